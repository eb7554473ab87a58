"""Text completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tpu_serve.request import FinishReason, TokenLogprobs
from tpu_serve.server import answer as answers
from tpu_serve.server.answer import check_num_choices, start_generations, stream_usage
from tpu_serve.server.body import dump_json, json_text
from tpu_serve.server.fanout import Fanout, Piece, Source, join
from tpu_serve.server.logprobs import TextPlace, completion_logprobs, prompt_logprobs
from tpu_serve.server.prompt import split_prompts
from tpu_serve.server.protocol import CompletionRequest, parse
from tpu_serve.server.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Counts,
    RequestMetrics,
    Usage,
    chunk,
    whole,
)
from tpu_serve.server.sampling import (
    check_cache_salt,
    check_logprobs,
    constraint_of,
    read_length,
    sampling_params,
    script_of,
    truncate,
)
from tpu_serve.server.service import Service, check_model, make_id

DEFAULT_MAX_TOKENS = 16


class CompletionAnswer:
    """See `Answer`.

    Args:
      prompts: token ids of each prompt.
      openings: text of each prompt that is echoed; none when none is.
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
        openings: Sequence[str],
        num_choices: int,
    ):
        self.request_id, self.ignored, self.is_stream = request_id, ignored, request.stream
        self._service, self._request, self._source = service, request, source
        self._prompts, self._openings, self._num_choices = prompts, openings, num_choices
        self._places: dict[int, TextPlace] = {}
        self._head: dict[str, Any] = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.names[0],
        }

    async def complete(self) -> dict[str, Any]:
        choices = []
        for piece in await join(self._source):
            choices.append(self._choice(piece, with_prompt=True))
            await asyncio.sleep(0)  # log-probabilities of long prompts take a while: others go on meanwhile
        return whole(CompletionReply(**self._head, choices=choices, usage=self.usage(), metrics=self._source.metrics()))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        include_usage, on_every_chunk = stream_usage(self._service, self._request)
        start = dump_json({**self._head, "choices": []}).decode()[:-2]
        async with aclosing(self._source.pieces()) as pieces:
            async for piece in pieces:
                usage = f',"usage":{self._source.counts().text()}' if on_every_chunk else ""
                yield f"{start}{self._choice_text(piece)}]{usage}}}".encode("ascii")
        if include_usage:
            metrics = self._source.metrics()
            yield dump_json(chunk(CompletionReply(**self._head, choices=[], usage=self.usage(), metrics=metrics)))

    def usage(self) -> Usage:
        return self._source.counts().usage()

    def close(self) -> None:
        self._source.close()

    def _choice_text(self, piece: Piece) -> str:
        """The JSON text of a streamed choice, with the fields that are set; it is written here because a stream sends one per token."""
        request = self._request
        if request.return_token_ids or request.prompt_logprobs is not None:
            return dump_json(chunk(self._choice(piece, with_prompt=piece.is_first))).decode()
        logprobs = "null"
        if request.logprobs is not None:
            logprobs = dump_json(self._logprob_fields(piece, with_prompt=piece.is_first)).decode()
        reason, stop = json_text(piece.finish_reason), json_text(piece.stop_reason)
        return (
            f'{{"index":{piece.index},"text":{json_text(piece.text)},"logprobs":{logprobs},"finish_reason":{reason},'
            f'"stop_reason":{stop}}}'
        )

    def _choice(self, piece: Piece, *, with_prompt: bool) -> CompletionChoice:
        choice = CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece, with_prompt=with_prompt),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = piece.token_ids
            if with_prompt:
                choice.prompt_token_ids = list(self._prompts[piece.index // self._num_choices])
        if self._request.prompt_logprobs is not None:
            num_top = self._request.prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs(
                self._service.tokenizer, piece.prompt_logprobs or (), num_top=num_top
            )
        return choice

    def _logprobs(self, piece: Piece, *, with_prompt: bool) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        return CompletionLogprobs(**self._logprob_fields(piece, with_prompt=with_prompt))

    def _logprob_fields(self, piece: Piece, *, with_prompt: bool) -> dict[str, Any]:
        prompt = self._prompts[piece.index // self._num_choices]
        place = self._places.get(piece.index)
        if place is None:
            place = self._places[piece.index] = TextPlace(
                self._service.tokenizer,
                skip_special_tokens=self._request.skip_special_tokens,
                prompt_token_ids=() if self._openings else prompt,
            )
        token_ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        if self._openings and with_prompt:
            token_ids += prompt
            entries += piece.prompt_logprobs or ()
            offsets += place.prompt(prompt, self._openings[piece.index // self._num_choices])
        for entry in piece.logprobs:
            token_ids.append(entry.token_id)
            entries.append(entry)
            offsets.append(place.next(entry.token_id))
        assert self._request.logprobs is not None
        return completion_logprobs(
            self._service.tokenizer,
            token_ids,
            entries,
            offsets,
            num_top=self._request.logprobs,
            as_ids=self._request.return_tokens_as_token_ids,
        )


class EchoOnly:
    """The prompts themselves, nothing generated; see `Source`.

    Args:
      scoring: generations of a token each, which is dropped, when log-probabilities of the prompts are wanted.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        num_choices: int,
        openings: Sequence[str],
        scoring: Source | None = None,
    ):
        self._prompts, self._num_choices, self._openings, self._scoring = prompts, num_choices, openings, scoring

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        if self._scoring is None:
            for index in range(len(self._openings) * self._num_choices):
                yield self._piece(index)
            return
        scores: dict[int, Piece] = {}
        async with aclosing(self._scoring.pieces()) as pieces:
            async for piece in pieces:
                first = scores.setdefault(piece.index, piece)
                if piece.finish_reason is not None:
                    yield self._piece(piece.index, first)

    def _piece(self, index: int, scored: Piece | None = None) -> Piece:
        return Piece(
            index,
            self._openings[index // self._num_choices],
            prompt_logprobs=None if scored is None else scored.prompt_logprobs,
            finish_reason=FinishReason.LENGTH,
        )

    def counts(self) -> Counts:
        num_cached = 0 if self._scoring is None else self._scoring.counts().cached
        return Counts(sum(len(prompt) for prompt in self._prompts), 0, num_cached)

    def metrics(self) -> RequestMetrics:
        return RequestMetrics() if self._scoring is None else self._scoring.metrics()

    def close(self) -> None:
        if self._scoring is not None:
            self._scoring.close()


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
    logprobs = check_logprobs(service, "logprobs", request.logprobs)
    is_echo_only = request.echo and request.max_tokens == 0
    max_tokens = 1 if is_echo_only else read_length("max_tokens", request.max_tokens) or DEFAULT_MAX_TOKENS
    params = sampling_params(service, request, max_tokens=max_tokens, logprobs=logprobs, scores_prompt=request.echo)
    salt, script = check_cache_salt(request.cache_salt), script_of(service, request)
    texts, prompts = await _read_prompts(service, request)
    openings = texts if request.echo else ()
    constraint = await constraint_of(service, request)
    source: Source
    if is_echo_only and params.prompt_logprobs is None:
        check_num_choices(service, len(prompts), params.n, "prompt")
        for prompt in prompts:
            service.frontend.engine.intake.requests(
                request_id, prompt, params, priority=request.priority or 0, forced_token_ids=script
            )  # for its checks
        source = EchoOnly(prompts, params.n, openings)
    else:
        generations = start_generations(
            service,
            request_id,
            prompts,
            params,
            cache_salt=salt,
            param="prompt",
            priority=request.priority or 0,
            constraint=None if script else constraint,  # a script says what comes, whatever is allowed
            forced_token_ids=script,
        )
        source = Fanout(generations, params.n, openings, interval=service.stream_interval)
        if is_echo_only:
            source = EchoOnly(prompts, params.n, openings, source)
    return CompletionAnswer(
        service,
        request,
        source,
        request_id=request_id,
        ignored=ignored,
        prompts=prompts,
        openings=openings,
        num_choices=params.n,
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
            must_fit = request.truncate_prompt_tokens is None
            text = item
            token_ids = await service.encode(item, request.add_special_tokens, "prompt", is_prompt=must_fit)
        else:
            text, token_ids = "", item
        kept = list(truncate(request, token_ids, service.info.max_model_len))
        if request.echo and (len(kept) < len(token_ids) or not text):
            text = service.tokenizer.decode(kept, request.skip_special_tokens)
        texts.append(text)
        prompts.append(kept)
        if place % 16 == 15:
            await asyncio.sleep(0)  # a thousand prompts take a while: others go on meanwhile
    return texts, prompts
