"""Server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from starlette.types import Message, Receive, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect chunks
}


def event(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


def named_event(payload: bytes) -> bytes:
    """An event under the name of its type, which is the first thing that it says."""
    return b"event: %b\ndata: %b\n\n" % (payload.split(b'"', 4)[3], payload)


class Frames(NamedTuple):
    """What a stream is made of.

    Attributes:
      event: what is sent of a JSON object.
      failure: what is sent of an error body; empty where streams tell of their failures themselves.
      end: what comes last.
    """

    event: Callable[[bytes], bytes]
    failure: Callable[[bytes], bytes]
    end: bytes


CHUNKS = Frames(event, event, DONE)
NAMED_EVENTS = Frames(named_event, lambda _: b"", b"")


@asynccontextmanager
async def keeping_alive(send: Send, seconds: float) -> AsyncIterator[Send]:
    """What to send by instead of `send`: a comment goes out after every `seconds` in which nothing else did; never when that is 0."""
    if not seconds:
        yield send
        return
    loop = asyncio.get_running_loop()
    last, num_under_way = loop.time(), 0

    async def noted(message: Message) -> None:
        nonlocal last, num_under_way
        num_under_way += 1
        try:
            await send(message)
        finally:
            num_under_way -= 1
            last = loop.time()

    async def beat() -> None:
        while True:
            left = last + seconds - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            elif num_under_way:  # the client does not read
                await asyncio.sleep(seconds)
            else:
                await noted({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    task = asyncio.create_task(beat())
    try:
        yield noted
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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
