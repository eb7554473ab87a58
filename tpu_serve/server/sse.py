"""Server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, NamedTuple

from starlette.types import Receive

from tpu_serve.server.body import dump_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect chunks
}


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(payload) + b"\n\n"


def named_event(payload: dict[str, Any]) -> bytes:
    """An event under the name of its type."""
    return b"event: " + payload["type"].encode() + b"\n" + event(payload)


class Frames(NamedTuple):
    """What a stream is made of.

    Attributes:
      event: a payload as bytes.
      failure: an error body as bytes; empty where streams tell of their failures themselves.
      end: what comes last.
    """

    event: Callable[[dict[str, Any]], bytes]
    failure: Callable[[dict[str, Any]], bytes]
    end: bytes


CHUNKS = Frames(event, event, DONE)
NAMED_EVENTS = Frames(named_event, lambda _: b"", b"")


async def with_pauses(
    chunks: AsyncGenerator[dict[str, Any], None], seconds: float
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """The chunks, and None after every `seconds` in which none came; never None when `seconds` is 0."""
    if not seconds:
        async for chunk in chunks:
            yield chunk
        return
    upcoming: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=seconds)
            if not done:
                yield None
                continue
            try:
                chunk = upcoming.result()
            except StopAsyncIteration:
                return
            yield chunk
            upcoming = asyncio.ensure_future(anext(chunks))
    finally:
        # An iterator cannot be closed while a step of it is under way.
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


async def until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Runs `work`, whose request has been read, but cancels it as soon as the client is gone.

    Returns:
      Whether it ran to its end.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    if task.cancelled():
        return False
    task.result()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
