"""Response bodies of every endpoint. In a stream only fields that were set are sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


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

    def without(self, num_completion: int) -> Usage:
        """The usage before so many tokens were generated."""
        num_before = self.completion_tokens - num_completion
        return Usage.of(self.prompt_tokens, num_before, self.prompt_tokens_details.cached_tokens)


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(BaseModel):
    """A whole answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
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


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: None = None
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
    usage: Usage
    system_fingerprint: None = None
    service_tier: None = None
    prompt_logprobs: None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


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
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(BaseModel):
    """One served name. `root` is where the weights come from; `max_model_len` is null while the model loads."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tpu-serve"
    root: str
    parent: None = None
    max_model_len: int | None
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
    """Why the server cannot answer now: loading (with the phase and its share in percent), draining or dead."""

    status: Literal["loading", "draining", "dead"]
    phase: str | None = None
    percent: int | None = None
    reason: str | None = None


class VersionReply(BaseModel):
    version: str


class LoadReply(BaseModel):
    server_load: int


def whole(reply: BaseModel) -> dict[str, Any]:
    """Every field, null where there is nothing."""
    return reply.model_dump()


def chunk(reply: BaseModel) -> dict[str, Any]:
    """Only the fields that were set."""
    return reply.model_dump(exclude_unset=True)
