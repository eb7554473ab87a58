"""The shape of an inference endpoint: a body starts an answer, which is taken whole or as a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from tpu_serve.engine.frontend import Generation
from tpu_serve.request import InvalidRequest, SamplingParams
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

    def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a stream."""

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
) -> list[Generation]:
    """One generation per prompt, or none at all when one of them is refused.

    Args:
      param: name of the field that held the prompts.
    """
    limit = service.info.max_num_queued
    if len(prompts) * params.n > limit:
        raise InvalidRequest(
            param if len(prompts) > 1 else "n",
            f"{len(prompts)} prompts with {params.n} choices each are more than the {limit} requests that may wait (--max-num-queued-reqs).",
            "too_many_choices",
        )
    # Clients choose their ids and may use one twice at a time; the engine needs unique ones.
    unique = f"{request_id}-{uuid.uuid4().hex[:12]}"
    generations: list[Generation] = []
    try:
        for place, prompt in enumerate(prompts):
            generations.append(
                service.frontend.start(f"{unique}-{place}", prompt, params, cache_salt=cache_salt, param=param)
            )
    except BaseException:
        for generation in generations:
            generation.close()
        raise
    return generations


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
                yield item
    finally:
        answer.close()
