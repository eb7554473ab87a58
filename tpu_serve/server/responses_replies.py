"""What /v1/responses answers: the response, the items of its output, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from tpu_serve.server.replies import CachedTokens, ChatLogprob, CompletionDetails, ErrorDetail, ReasoningUsage, Usage

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """The model's thoughts, whole and in the clear."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: Status = "in_progress"


class MessageItem(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []
    status: Status = "in_progress"


class FunctionCallItem(BaseModel):
    """`arguments` is JSON text, as the model wrote it: valid only if the model was right."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


Item = ReasoningItem | MessageItem | FunctionCallItem


class InputDetails(CachedTokens):
    """`cache_write_tokens` is 0: what is written to the prefix cache is not counted."""

    cache_write_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        """The usage of a chat in these words."""
        num_reasoning = usage.completion_tokens_details.reasoning_tokens if isinstance(usage, ReasoningUsage) else 0
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponseReply(BaseModel):
    """A response, and what it was asked for. `store` is false: nothing is kept."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item]
    usage: ResponseUsage | None = None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str


class ResponseEvent(BaseModel):
    """One event of a stream, under the name of its type; only the fields that this type has are sent."""

    type: str
    sequence_number: int
    response: ResponseReply | None = None
    output_index: int | None = None
    item: Item | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatLogprob] | None = None
    name: str | None = None
    arguments: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
    error: ErrorDetail | None = None
