"""Request bodies of every endpoint. Null means not given everywhere, and types are strict: "5" is not a number and true is not 1.

Only types are checked here; what values mean is checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import from_validation, show
from tpu_serve.server.parameters import check_fields

# A list of a million wrong items gets one complaint.
Strings = Annotated[list[StrictStr], Field(fail_fast=True)]
Integers = Annotated[list[StrictInt], Field(fail_fast=True)]
Object = dict[str, Any]
Biases = Annotated[Object, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = Field(None, description="end with a chunk that holds the usage")
    continuous_usage_stats: StrictBool | None = Field(
        None, description="with include_usage: cumulative usage on every chunk"
    )
    include_obfuscation: StrictBool | None = Field(None, description="accepted; chunks are never padded")


class ResponseFormat(BaseModel):
    """The form of the answer, in the words of OpenAI. What else it holds depends on the type; see `structured.form_of`."""

    model_config = ConfigDict(extra="allow")

    type: StrictStr = Field("text", description="text, json_object, json_schema or structural_tag")
    json_schema: Object | None = Field(None, description="with json_schema: name, schema, strict (always so)")


class StructuredOutputs(BaseModel):
    """The form of the answer: exactly one of these. Further keys are refused unless they ask for nothing."""

    model_config = ConfigDict(extra="allow")

    json_: StrictStr | Object | StrictBool | None = Field(None, alias="json", description="a JSON schema")
    regex: StrictStr | None = Field(None, description="a regular expression that the whole answer matches")
    choice: Strings | None = Field(None, description="the answer is one of these texts")
    grammar: StrictStr | None = Field(None, description="a grammar in Lark or GBNF form")
    json_object: StrictBool | None = Field(None, description="any JSON object")
    structural_tag: StrictStr | Object | None = Field(None, description="schemas that hold between tags")


class CommonFields(BaseModel):
    """What all endpoints that generate have in common."""

    model: StrictStr | None = Field(None, description="a served name; the served model when left out")
    # generation
    temperature: StrictFloat | None = Field(None, description="in [0, 2]; 0 is greedy")
    top_p: StrictFloat | None = Field(None, description="in (0, 1]")
    top_k: StrictInt | None = Field(None, description="0 and -1 keep every token")
    min_p: StrictFloat | None = Field(None, description="in [0, 1]")
    seed: StrictInt | None = Field(
        None, description="the same seed, prompt and parameters give the same answer; -1 is no seed"
    )
    stop: StrictStr | Strings | None = Field(None, description="strings that end the text")
    stop_token_ids: Integers | None = None
    presence_penalty: StrictFloat | None = Field(None, description="in [-2, 2]; for tokens that were generated")
    frequency_penalty: StrictFloat | None = Field(None, description="in [-2, 2]; once for each time of them")
    repetition_penalty: StrictFloat | None = Field(None, description="above 0; for tokens of the prompt and the answer")
    logit_bias: Biases | None = Field(None, description="token ids and what is added to their logits, in [-100, 100]")
    min_tokens: StrictInt | None = Field(None, description="nothing ends the answer before so many tokens")
    bad_words: Strings | None = Field(None, description="texts that are never generated")
    allowed_token_ids: Integers | None = Field(None, description="only these are generated")
    structured_outputs: StructuredOutputs | None = Field(None, description="the form of the answer")
    priority: StrictInt | None = Field(None, description="lower ones go first; needs --scheduling-policy priority")
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    spaces_between_special_tokens: StrictBool = Field(
        True, description="without effect: no tokenizer that is served puts spaces there"
    )
    # prompt
    cache_salt: StrictStr | None = Field(None, description="cached prefixes are shared only under the same salt")
    # answer
    stream: StrictBool = False
    scripted_token_ids: Integers | None = Field(
        None, description="for tests: the ids that are generated; needs --enable-scripted-output"
    )
    request_id: StrictStr | None = Field(None, description="used in the answer's id")


class GenerationFields(CommonFields):
    """What completions and chat have in common."""

    n: StrictInt | None = Field(None, description="choices per prompt")
    best_of: StrictInt | None = Field(None, description="must equal n")
    max_tokens: StrictInt | None = None
    prompt_logprobs: StrictInt | None = Field(
        None, description="alternatives per token of the prompt; 0 for the prompt's own only; not in a stream"
    )
    response_format: ResponseFormat | None = Field(None, description="the form of the answer")
    truncate_prompt_tokens: StrictInt | None = Field(None, description="keep so many prompt tokens; -1 keeps what fits")
    truncation_side: StrictStr = Field("left", description="the side that truncation cuts: left or right")
    stream_options: StreamOptions | None = None
    echo: StrictBool = False
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = Field(False, description="tokens of logprobs read token_id:N")


class CompletionRequest(GenerationFields):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        None, description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    logprobs: StrictInt | None = Field(None, description="alternatives per token; 0 for the sampled one only")
    add_special_tokens: StrictBool = True


class Message(BaseModel):
    """One turn. Further keys reach the chat template."""

    model_config = ConfigDict(extra="allow")

    role: StrictStr = Field(description="system, developer, user, assistant, tool or what the chat template knows")
    content: StrictStr | list[Object] | None = Field(None, description="a text or a list of text parts")


class ChatFields(BaseModel):
    """What turns messages into a prompt."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    add_generation_prompt: StrictBool | None = Field(None, description="end the prompt with the opening of the answer")
    continue_final_message: StrictBool = Field(False, description="let the model continue the last message")
    add_special_tokens: StrictBool = False
    documents: list[Object] | None = None
    chat_template_kwargs: Object = Field({}, description="further variables of the chat template")
    chat_template: StrictStr | None = Field(
        None, description="jinja2 source in place of the model's; needs --trust-request-chat-template"
    )
    tools: Annotated[list[Object], Field(fail_fast=True)] | None = Field(
        None,
        description="functions that the model may call: {type: function, function: {name, description, parameters}}",
    )
    reasoning_effort: StrictStr | None = Field(
        None, description="none, minimal, low, medium, high, xhigh or max; none turns thinking off where the model can"
    )


class ChatCompletionRequest(GenerationFields, ChatFields):
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = Field(
        None, description="none, auto, required or {type: function, function: {name}}"
    )
    parallel_tool_calls: StrictBool = Field(True, description="false keeps the first call only")
    include_reasoning: StrictBool = Field(True, description="false leaves the reasoning out of the answer")
    thinking_token_budget: StrictInt | None = Field(
        None, description="reasoning ends after so many tokens; -1 for no limit"
    )
    return_prompt_text: StrictBool = Field(False, description="send the rendered prompt with the answer")
    max_completion_tokens: StrictInt | None = Field(
        None, description="wins over max_tokens; the rest of the context when left out"
    )
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, description="alternatives per token; needs logprobs")


class TokenizeFields(BaseModel):
    model: StrictStr | None = None
    return_token_strs: StrictBool = False


class TokenizeTextRequest(TokenizeFields):
    prompt: StrictStr
    add_special_tokens: StrictBool = True


class TokenizeChatRequest(TokenizeFields, ChatFields):
    pass


class DetokenizeRequest(BaseModel):
    model: StrictStr | None = None
    tokens: Integers


R = TypeVar("R", bound=BaseModel)


def parse(model: type[R], body: object, *, strict_fields: bool) -> tuple[R, tuple[str, ...]]:
    """The request that a JSON body makes, and the names of fields that are ignored.

    Raises:
      InvalidRequest: the body is not an object, a field has the wrong type, or asks for what is not served.
    """
    given = given_fields(body)
    ignored = check_fields({**given, **_unknown_inside(model, given)}, model.model_fields, strict=strict_fields)
    try:
        return model.model_validate(given), ignored
    except ValidationError as error:
        raise from_validation(error) from None


def _unknown_inside(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """What nested objects hold that their models do not know, by names such as `stream_options.x`."""
    unknown = {}
    for name, value in given.items():
        if name not in model.model_fields or not isinstance(value, dict):
            continue
        annotation = model.model_fields[name].annotation
        for kind in get_args(annotation) or (annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.model_config.get("extra") != "allow":
                unknown.update(
                    {
                        f"{name}.{key}": item
                        for key, item in value.items()
                        if item is not None and key not in kind.model_fields
                    }
                )
    return unknown


def given_fields(body: object) -> Mapping[str, Any]:
    """Fields that are not null.

    Raises:
      InvalidRequest: the body is not an object.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(None, f"The request body must be a JSON object, got {show(body)}.", "invalid_type")
    return {name: value for name, value in body.items() if value is not None}
