"""The body of /v1/responses, and what is known of that endpoint but not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import Unsupported, is_neutral, unsupported
from tpu_serve.server.protocol import CommonFields, Object, StreamOptions, Strings, given_fields, parse

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
_WITHOUT_EFFECT = frozenset(
    {
        "reasoning.encrypted_content",  # reasoning is sent as it is
        "web_search_call.action.sources",
        "web_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
    }
)

_STATELESS = "nothing is stored between requests, so send the whole conversation as input"
_CLEAR = "send the text itself as input"
REFUSED: Mapping[str, Unsupported] = {
    "previous_response_id": Unsupported(hint=_STATELESS),
    "conversation": Unsupported(hint=_STATELESS),
    "background": Unsupported((False,), "keep the connection open, best with stream = true"),
    "prompt": Unsupported(hint=_CLEAR),
    "context_management": Unsupported(([],), "use truncation"),
    "moderation": Unsupported(),
    # what other endpoints call what this one has
    "messages": Unsupported(hint="it is called input here"),
    "max_tokens": Unsupported(hint="it is called max_output_tokens here"),
    "max_completion_tokens": Unsupported(hint="it is called max_output_tokens here"),
    "response_format": Unsupported(hint="it is called text.format here"),
    "reasoning_effort": Unsupported(hint="it is called reasoning.effort here"),
    "logprobs": Unsupported((False,), f"ask for them with include = [{LOGPROBS}]"),
    "truncate_prompt_tokens": Unsupported(hint="use truncation"),
    # what it has not
    "n": Unsupported((1,), "a response is one answer, so send several requests"),
    "best_of": Unsupported((1,)),
    "echo": Unsupported((False,)),
    "prompt_logprobs": Unsupported(hint="use /v1/completions or /v1/chat/completions"),
    "return_token_ids": Unsupported((False,), "use /v1/completions or /v1/chat/completions"),
}
"""Known fields that are not served here, besides those that no endpoint serves."""


class ResponseText(BaseModel):
    """What the text of an answer looks like. Further keys do nothing and are named in the header of ignored fields."""

    model_config = ConfigDict(extra="allow")

    format: Object | None = Field(
        None, description="{type: text}, {type: json_object} or {type: json_schema, name, schema}"
    )


class ResponseReasoning(BaseModel):
    """Further keys do nothing and are named in the header of ignored fields: reasoning is sent whole, not as a summary."""

    model_config = ConfigDict(extra="allow")

    effort: StrictStr | None = Field(
        None, description="none, minimal, low, medium, high, xhigh or max; none turns thinking off where the model can"
    )


class ResponseRequest(CommonFields):
    input: StrictStr | Annotated[list[Object], Field(fail_fast=True)] = Field(
        description="a text, or items: messages of text parts, function_call, function_call_output and reasoning"
    )
    instructions: StrictStr | None = Field(None, description="a system message before the input")
    max_output_tokens: StrictInt | None = Field(
        None, description="reasoning included; the rest of the context when left out"
    )
    top_logprobs: StrictInt | None = Field(None, description=f"alternatives per token; needs {LOGPROBS} in include")
    include: Strings | None = Field(None, description=f"{LOGPROBS}: log-probabilities of the text's tokens")
    text: ResponseText | None = None
    tools: Annotated[list[Object], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call: {type: function, name, description, parameters}"
    )
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = Field(
        None, description="none, auto, required or {type: function, name}"
    )
    parallel_tool_calls: StrictBool = Field(True, description="false keeps the first call only")
    max_tool_calls: StrictInt | None = Field(None, description="of tools of the server, which has none")
    reasoning: ResponseReasoning | None = None
    truncation: StrictStr = Field("disabled", description="auto drops the oldest items of an input that is too long")
    metadata: Object | None = Field(None, description="up to 16 texts by name, repeated in the answer")
    store: StrictBool = Field(False, description="accepted, but nothing is stored")
    stream_options: StreamOptions | None = Field(None, description="without effect: the last event has the usage")
    chat_template_kwargs: Object = Field({}, description="further variables of the chat template")
    thinking_token_budget: StrictInt | None = Field(
        None, description="reasoning ends after so many tokens; -1 for no limit"
    )

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def parse_response(body: object, *, strict_fields: bool) -> tuple[ResponseRequest, tuple[str, ...]]:
    """The request that a JSON body makes, and the names of fields that are ignored.

    Raises:
      InvalidRequest: a field has the wrong type or value, or asks for what is not served.
    """
    given = dict(given_fields(body))
    for name, entry in REFUSED.items():
        if name in given:
            value = given.pop(name)
            if not is_neutral(entry, value):
                raise unsupported(name, value, entry.hint)
    request, ignored = parse(ResponseRequest, given, strict_fields=strict_fields)
    _check_metadata(request.metadata)
    if not request.input and not isinstance(request.input, str):
        raise InvalidRequest("input", "input must hold at least one item.")
    if request.truncation not in ("auto", "disabled"):
        raise InvalidRequest("truncation", f"truncation must be auto or disabled, got {show(request.truncation)}.")
    for name in request.include or ():
        if name != LOGPROBS and name not in _WITHOUT_EFFECT:
            raise InvalidRequest(
                "include", f"include must hold {LOGPROBS} or nothing, got {show(name)}.", "unsupported_parameter"
            )
        if name in _WITHOUT_EFFECT:
            ignored += (f"include.{name}",)
    if request.top_logprobs and not request.wants_logprobs:
        raise InvalidRequest("top_logprobs", f"top_logprobs needs {LOGPROBS} in include.")
    for part in (request.text, request.reasoning):
        if part is not None:
            field = "text" if part is request.text else "reasoning"
            ignored += tuple(f"{field}.{key}" for key, value in (part.model_extra or {}).items() if value is not None)
    return request, ignored


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest("metadata", f"metadata may hold {MAX_METADATA} entries, got {len(metadata)}.")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise InvalidRequest(
                "metadata", f"The values of metadata must be strings, got {show(value)}.", "invalid_type"
            )
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise InvalidRequest(
                "metadata",
                f"metadata may have names of {MAX_METADATA_KEY} characters and values of {MAX_METADATA_VALUE}.",
            )
