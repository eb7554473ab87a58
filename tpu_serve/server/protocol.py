"""Request bodies of every endpoint. Null means not given everywhere, and types are strict: "5" is not a number and true is not 1.

Only types are checked here; what values mean is checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

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
    model_config = ConfigDict(extra="allow")

    type: StrictStr = "text"


class GenerationFields(BaseModel):
    """What completions and chat have in common."""

    model: StrictStr | None = Field(None, description="a served name; the served model when left out")
    # generation
    n: StrictInt | None = Field(None, description="choices per prompt")
    best_of: StrictInt | None = Field(None, description="must equal n")
    max_tokens: StrictInt | None = None
    temperature: StrictFloat | None = Field(None, description="in [0, 2]; 0 is greedy")
    top_p: StrictFloat | None = Field(None, description="in (0, 1]")
    top_k: StrictInt | None = Field(None, description="0 and -1 keep every token")
    min_p: StrictFloat | None = Field(None, description="in [0, 1]")
    seed: StrictInt | None = Field(
        None, description="the same seed, prompt and parameters give the same answer; -1 is no seed"
    )
    stop: StrictStr | Strings | None = Field(None, description="strings that end the text")
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    # prompt
    truncate_prompt_tokens: StrictInt | None = Field(None, description="keep so many prompt tokens; -1 keeps what fits")
    truncation_side: StrictStr = Field("left", description="the side that truncation cuts: left or right")
    cache_salt: StrictStr | None = Field(None, description="cached prefixes are shared only under the same salt")
    # answer
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    echo: StrictBool = False
    return_token_ids: StrictBool = False
    response_format: ResponseFormat | None = None
    request_id: StrictStr | None = Field(None, description="used in the answer's id")


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


class ChatCompletionRequest(GenerationFields, ChatFields):
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
    ignored = check_fields(given, model.model_fields, strict=strict_fields)
    try:
        return model.model_validate(given), ignored
    except ValidationError as error:
        raise from_validation(error) from None


def given_fields(body: object) -> Mapping[str, Any]:
    """Fields that are not null.

    Raises:
      InvalidRequest: the body is not an object.
    """
    if not isinstance(body, dict):
        raise InvalidRequest(None, f"The request body must be a JSON object, got {show(body)}.", "invalid_type")
    return {name: value for name, value in body.items() if value is not None}
