"""Response bodies of every endpoint. In a stream only fields that were set are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from tpu_serve.request import Timing


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int | str
    reason: str


class ErrorReply(BaseModel):
    """Every failure, on every path; in a running stream it is an event of its own."""

    error: ErrorDetail


class CachedTokens(BaseModel):
    cached_tokens: int


class Counts(NamedTuple):
    """Tokens of an answer. `reasoning` is None where it is not told from the rest."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None = None

    def text(self) -> str:
        """The JSON text of the usage."""
        reasoning = (
            "" if self.reasoning is None else f',"completion_tokens_details":{{"reasoning_tokens":{self.reasoning}}}'
        )
        return (
            f'{{"prompt_tokens":{self.prompt},"completion_tokens":{self.completion},"total_tokens":{self.prompt + self.completion},'
            f'"prompt_tokens_details":{{"cached_tokens":{self.cached}}}{reasoning}}}'
        )

    def usage(self) -> Usage:
        """The same as a part of a reply."""
        usage = Usage.of(self.prompt, self.completion, self.cached)
        return usage if self.reasoning is None else ReasoningUsage.with_reasoning(usage, self.reasoning)


class Usage(BaseModel):
    """Tokens; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, num_prompt: int, num_completion: int, num_cached: int) -> Usage:
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=CachedTokens(cached_tokens=num_cached),
        )


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class ReasoningUsage(Usage):
    """Usage of an answer whose reasoning is told from its words; completion_tokens counts both."""

    completion_tokens_details: CompletionDetails

    @classmethod
    def with_reasoning(cls, usage: Usage, num_reasoning: int) -> ReasoningUsage:
        return cls(**dict(usage), completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning))


class PromptLogprob(BaseModel):
    """Of one token at one place of the prompt. `rank` counts from 1 and is null for a token beyond the alternatives."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of the prompt; null for the first one."""


class RequestMetrics(BaseModel):
    """Where the time went, milliseconds; of several choices the one that came first. Null for what has not happened.

    Attributes:
      queue_ms: from the arrival until the request was admitted to the batch.
      ttft_ms: from the arrival to the first token.
    """

    queue_ms: float | None = None
    ttft_ms: float | None = None

    @classmethod
    def of(cls, timings: Sequence[Timing | None]) -> RequestMetrics:
        known = [timing for timing in timings if timing is not None]
        queues = [timing.admitted - timing.arrival for timing in known if timing.admitted is not None]
        firsts = [timing.first_token - timing.arrival for timing in known if timing.first_token is not None]
        return cls(
            queue_ms=round(1000 * min(queues), 3) if queues else None,
            ttft_ms=round(1000 * min(firsts), 3) if firsts else None,
        )


class CompletionLogprobs(BaseModel):
    """One entry per token. The first token of an echoed prompt has null for its log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    system_fingerprint: None = None
    service_tier: None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class FunctionCall(BaseModel):
    """`arguments` is JSON text, as the model wrote it: valid only if the model was right."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """The content is null when there is reasoning or a call and nothing else. reasoning_content repeats reasoning for older clients."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ReasoningUsage | Usage
    metrics: RequestMetrics | None = None
    system_fingerprint: None = None
    service_tier: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """A call's id, type and name come once, with its first part; its arguments come in pieces."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ReasoningUsage | Usage | None = None
    metrics: RequestMetrics | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class ModelCard(BaseModel):
    """One served name. `root` is where the weights come from; `max_model_len` is null while the model loads.

    Attributes:
      reasoning_parser, tool_call_parser: how answers are read; null where they are taken as they are, and while the model loads.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tpu-serve"
    root: str
    parent: None = None
    max_model_len: int | None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    permission: list[dict[str, Any]]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    prompt: str


class HealthReply(BaseModel):
    """Why the server cannot answer now: loading (with the phase and its share in percent), draining, dead, or stalled: it
    said so only when it was asked to generate."""

    status: Literal["loading", "draining", "dead", "stalled"]
    phase: str | None = None
    percent: int | None = None
    reason: str | None = None


class VersionReply(BaseModel):
    version: str


class LoadReply(BaseModel):
    server_load: int


class SuccessReply(BaseModel):
    success: bool


class ServerInfoReply(BaseModel):
    """What this server is: options that differ from their defaults (keys left out), versions, devices, and the engine's sizes."""

    version: str
    versions: dict[str, str]
    status: str
    models: list[str]
    uptime_seconds: float
    server_options: dict[str, Any]
    engine_options: dict[str, Any]
    devices: list[dict[str, Any]]
    engine: dict[str, Any] | None


def whole(reply: BaseModel) -> dict[str, Any]:
    """Every field, null where there is nothing."""
    return reply.model_dump()


def chunk(reply: BaseModel) -> dict[str, Any]:
    """Only the fields that were set."""
    return reply.model_dump(exclude_unset=True)
