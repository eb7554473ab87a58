"""The shape of an inference endpoint: a body starts an answer, which is taken whole or as a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from tpu_serve.engine.frontend import Generation
from tpu_serve.request import Constraint, InvalidRequest, SamplingParams
from tpu_serve.server.protocol import GenerationFields
from tpu_serve.server.replies import Usage
from tpu_serve.server.service import Service


class Answer(Protocol):
    """An answer under way. Take it once, by `complete` or by `stream`, and `close` it whatever happens.

    Attributes:
      request_id: base of the answer's id.
      is_stream: the request asked for a stream.
      ignored: names of request fields that had no effect.
    """

    request_id: str
    is_stream: bool
    ignored: tuple[str, ...]

    async def complete(self) -> dict[str, Any]:
        """The whole answer."""

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a stream, each a JSON object."""

    def usage(self) -> Usage:
        """Tokens so far."""

    def close(self) -> None:
        """Ends what still runs."""


class Start(Protocol):
    """Checks a request and starts generating, or raises what `errors.error_body` understands."""

    def __call__(self, body: Any, service: Service, request_id: str | None = None) -> Awaitable[Answer]: ...


def start_generations(
    service: Service,
    request_id: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    cache_salt: str,
    param: str,
    priority: int = 0,
    constraint: Constraint | None = None,
    forced_token_ids: Sequence[int] = (),
    shown_token_ids: Iterable[int] = (),
) -> list[Generation]:
    """One generation per prompt, or none at all when one of them is refused.

    Args:
      param: name of the field that held the prompts.
      priority, constraint, forced_token_ids, shown_token_ids: see `Intake.requests`; every prompt gets its own copy of the constraint.
    """
    check_num_choices(service, len(prompts), params.n, param)
    most, num_tokens = service.info.max_num_queued_tokens, params.n * sum(map(len, prompts))
    # They wait together, so they would be turned away for ever.
    if most is not None and len(prompts) > 1 and num_tokens > most:
        raise InvalidRequest(
            param,
            f"{len(prompts)} prompts with {params.n} choices each have {num_tokens} tokens, more than the {most} that may ever wait "
            f"(--max-num-queued-tokens).",
            "prompt_exceeds_queue",
        )
    # Clients choose their ids and may use one twice at a time; the engine needs unique ones.
    unique = f"{request_id}-{uuid.uuid4().hex[:12]}"
    generations: list[Generation] = []
    try:
        for place, prompt in enumerate(prompts):
            generations.append(
                service.frontend.start(
                    f"{unique}-{place}",
                    prompt,
                    params,
                    cache_salt=cache_salt,
                    param=param,
                    priority=priority,
                    constraint=None if constraint is None else constraint.copy(),
                    forced_token_ids=forced_token_ids,
                    shown_token_ids=shown_token_ids,
                )
            )
    except BaseException:
        for generation in generations:
            generation.close()
        raise
    return generations


def check_num_choices(service: Service, num_prompts: int, num_choices: int, param: str) -> None:
    """Refuses more choices than may ever wait."""
    limit = service.info.max_num_queued
    if num_prompts * num_choices > limit:
        raise InvalidRequest(
            param if num_prompts > 1 else "n",
            f"{num_prompts} prompts with {num_choices} choices each are more than the {limit} requests that may wait (--max-num-queued-reqs).",
            "too_many_choices",
        )


def stream_usage(service: Service, request: GenerationFields) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether every chunk has it too."""
    if service.include_usage:
        return True, True
    options = request.stream_options
    at_end = bool(options and options.include_usage)
    return at_end, at_end and bool(options and options.continuous_usage_stats)


async def complete(start: Start, body: Any, service: Service, request_id: str | None = None) -> dict[str, Any]:
    """The whole answer to a request, without HTTP. Cancel it to abort. What HTTP says in a header is in `ignored_fields`."""
    answer = await start(body, service, request_id)
    try:
        reply = await answer.complete()
        return {**reply, "ignored_fields": list(answer.ignored)} if answer.ignored else reply
    finally:
        answer.close()


async def stream(
    start: Start, body: Any, service: Service, request_id: str | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of an answer, without HTTP. Close the iterator to abort."""
    answer = await start(body, service, request_id)
    try:
        async with aclosing(answer.stream()) as chunks:
            async for item in chunks:
                yield json.loads(item)
    finally:
        answer.close()
