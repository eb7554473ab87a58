"""Text completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tpu_serve.request import FinishReason
from tpu_serve.server import answer as answers
from tpu_serve.server.answer import start_generations
from tpu_serve.server.fanout import Fanout, Piece, Source, join
from tpu_serve.server.logprobs import completion_logprobs, end_offset
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.prompt import split_prompts
from tpu_serve.server.protocol import CompletionRequest, parse
from tpu_serve.server.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
    chunk,
    whole,
)
from tpu_serve.server.sampling import check_cache_salt, check_logprobs, read_length, sampling_params, truncate
from tpu_serve.server.service import Service, check_model, make_id

DEFAULT_MAX_TOKENS = 16


class CompletionAnswer:
    """See `Answer`.

    Args:
      prompts: token ids of each prompt.
      num_choices: per prompt.
    """

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        source: Source,
        *,
        request_id: str,
        ignored: tuple[str, ...],
        prompts: Sequence[Sequence[int]],
        num_choices: int,
    ):
        self.request_id, self.ignored, self.is_stream = request_id, ignored, request.stream
        self._service, self._request, self._source = service, request, source
        self._prompts, self._num_choices = prompts, num_choices
        self._offsets: dict[int, int] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.names[0],
        }

    async def complete(self) -> dict[str, Any]:
        pieces = await join(self._source)
        choices = [self._choice(piece, with_prompt=True) for piece in pieces]
        return whole(CompletionReply(**self._head, choices=choices, usage=self.usage()))

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        options = self._request.stream_options
        include_usage = bool(options and options.include_usage)
        on_every_chunk = include_usage and bool(options and options.continuous_usage_stats)
        async with aclosing(self._source.pieces()) as pieces:
            async for piece in pieces:
                extra: dict[str, Any] = {"usage": self.usage()} if on_every_chunk else {}
                choice = self._choice(piece, with_prompt=piece.is_first)
                yield chunk(CompletionReply(**self._head, choices=[choice], **extra))
        if include_usage:
            yield chunk(CompletionReply(**self._head, choices=[], usage=self.usage()))

    def usage(self) -> Usage:
        return self._source.usage()

    def close(self) -> None:
        self._source.close()

    def _choice(self, piece: Piece, *, with_prompt: bool) -> CompletionChoice:
        choice = CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = piece.token_ids
            if with_prompt:
                choice.prompt_token_ids = list(self._prompts[piece.index // self._num_choices])
        return choice

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        tokenizer, offset = self._service.tokenizer, self._offsets.get(piece.index, 0)
        self._offsets[piece.index] = end_offset(tokenizer, piece.logprobs, offset)
        return completion_logprobs(tokenizer, piece.logprobs, offset)


class EchoOnly:
    """The prompts themselves, nothing generated; see `Source`."""

    def __init__(self, prompts: Sequence[Sequence[int]], num_choices: int, openings: Sequence[str]):
        self._prompts, self._num_choices, self._openings = prompts, num_choices, openings

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        for index in range(len(self._openings) * self._num_choices):
            yield Piece(index, self._openings[index // self._num_choices], finish_reason=FinishReason.LENGTH)

    def usage(self) -> Usage:
        return Usage.of(sum(len(prompt) for prompt in self._prompts), 0, 0)

    def close(self) -> None:
        pass


async def start_completion(body: Any, service: Service, request_id: str | None = None) -> CompletionAnswer:
    """Checks a completion request and starts generating.

    Args:
      request_id: wins over the body's.

    Raises:
      InvalidRequest: the request cannot be served as asked.
    """
    request, ignored = parse(CompletionRequest, body, strict_fields=service.strict_fields)
    check_model(request.model, service.names)
    request_id = request_id or make_id(request.request_id)
    logprobs = check_logprobs("logprobs", request.logprobs)
    if request.echo and logprobs is not None:
        raise unsupported(
            "echo", True, "together with logprobs it needs log-probabilities of the prompt, which are not available"
        )
    is_echo_only = request.echo and request.max_tokens == 0
    max_tokens = 1 if is_echo_only else read_length("max_tokens", request.max_tokens) or DEFAULT_MAX_TOKENS
    params = sampling_params(service, request, max_tokens=max_tokens, logprobs=logprobs)
    salt = check_cache_salt(request.cache_salt)
    texts, prompts = await _read_prompts(service, request)
    openings = texts if request.echo else ()
    source: Source
    if is_echo_only:
        for prompt in prompts:
            service.frontend.engine.intake.requests(request_id, prompt, params)  # for its checks
        source = EchoOnly(prompts, params.n, openings)
    else:
        generations = start_generations(service, request_id, prompts, params, cache_salt=salt, param="prompt")
        source = Fanout(generations, params.n, openings)
    return CompletionAnswer(
        service, request, source, request_id=request_id, ignored=ignored, prompts=prompts, num_choices=params.n
    )


async def create_completion(body: Any, service: Service, request_id: str | None = None) -> dict[str, Any]:
    """The whole answer to a completion request, without HTTP.

    Raises:
      InvalidRequest, EngineDead, HttpError: see `errors.error_body`.
    """
    return await answers.complete(start_completion, body, service, request_id)


def stream_completion(
    body: Any, service: Service, request_id: str | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a completion, without HTTP; raises as `create_completion` does, at any point."""
    return answers.stream(start_completion, body, service, request_id)


async def _read_prompts(service: Service, request: CompletionRequest) -> tuple[list[str], list[list[int]]]:
    """The text of each prompt, as an echo shows it, and its token ids."""
    texts: list[str] = []
    prompts: list[list[int]] = []
    for place, item in enumerate(split_prompts(request.prompt)):
        if isinstance(item, str):
            text, token_ids = item, await service.encode(item, request.add_special_tokens, "prompt")
        else:
            text, token_ids = "", item
        kept = list(truncate(request, token_ids, service.info.max_model_len))
        if request.echo and (len(kept) < len(token_ids) or not text):
            text = service.tokenizer.decode(kept)
        texts.append(text)
        prompts.append(kept)
        if place % 16 == 15:
            await asyncio.sleep(0)  # a thousand prompts take a while: others go on meanwhile
    return texts, prompts
