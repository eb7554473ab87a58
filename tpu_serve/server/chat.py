"""Chat completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server import answer as answers
from tpu_serve.server.answer import start_generations
from tpu_serve.server.fanout import Fanout, Piece, Source, join
from tpu_serve.server.logprobs import chat_logprobs
from tpu_serve.server.prompt import chat_token_ids
from tpu_serve.server.protocol import ChatCompletionRequest, parse
from tpu_serve.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    Usage,
    chunk,
    whole,
)
from tpu_serve.server.sampling import check_cache_salt, check_logprobs, read_length, sampling_params, truncate
from tpu_serve.server.service import Service, check_model, make_id


class ChatAnswer:
    """See `Answer`."""

    def __init__(
        self,
        service: Service,
        request: ChatCompletionRequest,
        source: Source,
        *,
        request_id: str,
        ignored: tuple[str, ...],
        prompt_token_ids: list[int],
    ):
        self.request_id, self.ignored, self.is_stream = request_id, ignored, request.stream
        self._service, self._request, self._source = service, request, source
        self._prompt_token_ids = prompt_token_ids if request.return_token_ids else None
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": service.names[0],
        }

    async def complete(self) -> dict[str, Any]:
        choices = [
            ChatChoice(
                index=piece.index,
                message=ChatMessage(content=piece.text),
                logprobs=self._logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
                token_ids=piece.token_ids if self._request.return_token_ids else None,
            )
            for piece in await join(self._source)
        ]
        return whole(
            ChatReply(**self._head, choices=choices, usage=self.usage(), prompt_token_ids=self._prompt_token_ids)
        )

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        options = self._request.stream_options
        include_usage = bool(options and options.include_usage)
        on_every_chunk = include_usage and bool(options and options.continuous_usage_stats)

        def make(choices: list[ChatChunkChoice], usage: Usage | None, **fields: Any) -> dict[str, Any]:
            if usage is not None:
                fields["usage"] = usage
            return chunk(ChatChunk(object="chat.completion.chunk", **self._head, choices=choices, **fields))

        async with aclosing(self._source.pieces()) as pieces:
            async for piece in pieces:
                usage = self.usage() if on_every_chunk else None
                if piece.is_first:
                    # The role comes before the piece's tokens do.
                    opening = self._choice(piece.index, ChatDelta(role="assistant", content=""))
                    yield make([opening], usage and usage.without(len(piece.token_ids)), **self._prompt_fields())
                yield make([self._piece(piece)], usage)
        if include_usage:
            yield make([], self.usage())

    def usage(self) -> Usage:
        return self._source.usage()

    def close(self) -> None:
        self._source.close()

    def _prompt_fields(self) -> dict[str, Any]:
        return {} if self._prompt_token_ids is None else {"prompt_token_ids": self._prompt_token_ids}

    def _piece(self, piece: Piece) -> ChatChunkChoice:
        choice = self._choice(piece.index, ChatDelta(content=piece.text) if piece.text else ChatDelta())
        choice.logprobs, choice.finish_reason = self._logprobs(piece), piece.finish_reason
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = piece.token_ids
        return choice

    @staticmethod
    def _choice(index: int, delta: ChatDelta) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(self._service.tokenizer, piece.logprobs) if self._request.logprobs else None


async def start_chat(body: Any, service: Service, request_id: str | None = None) -> ChatAnswer:
    """Checks a chat request and starts generating.

    Args:
      request_id: wins over the body's.

    Raises:
      InvalidRequest: the request cannot be served as asked.
    """
    request, ignored = parse(ChatCompletionRequest, body, strict_fields=service.strict_fields)
    check_model(request.model, service.names)
    request_id = request_id or make_id(request.request_id)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs = true.")
    top_logprobs = check_logprobs("top_logprobs", request.top_logprobs) or 0
    max_tokens = read_length("max_tokens", request.max_tokens)
    if request.max_completion_tokens is not None:
        max_tokens = read_length("max_completion_tokens", request.max_completion_tokens)
    params = sampling_params(
        service, request, max_tokens=max_tokens, logprobs=top_logprobs if request.logprobs else None
    )
    salt = check_cache_salt(request.cache_salt)
    token_ids, ignored_variables = await chat_token_ids(service, request)
    token_ids = list(truncate(request, token_ids, service.info.max_model_len))
    generations = start_generations(service, request_id, [token_ids], params, cache_salt=salt, param="messages")
    return ChatAnswer(
        service,
        request,
        Fanout(generations, params.n, [_echo(request)]),
        request_id=request_id,
        ignored=ignored + ignored_variables,
        prompt_token_ids=token_ids,
    )


async def create_chat_completion(body: Any, service: Service, request_id: str | None = None) -> dict[str, Any]:
    """The whole answer to a chat request, without HTTP.

    Raises:
      InvalidRequest, EngineDead, HttpError: see `errors.error_body`.
    """
    return await answers.complete(start_chat, body, service, request_id)


def stream_chat_completion(
    body: Any, service: Service, request_id: str | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a chat answer, without HTTP; raises as `create_chat_completion` does, at any point."""
    return answers.stream(start_chat, body, service, request_id)


def _echo(request: ChatCompletionRequest) -> str:
    """With `echo`, an answer that speaks for the same role as the last message begins with that message."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(str(part.get("text", "")) for part in last.content)
