"""Server-sent events, and the watch for clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

from tpu_serve.server.body import dump_json

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect chunks
}


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + dump_json(payload) + b"\n\n"


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
