"""Keeps a bounded number of a batch's lines in flight and hands on their results, in order or as they finish."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tpu_serve.cli.batch_file import BatchLine, Result

T = TypeVar("T")
LINES_READ_AHEAD = 64
HELD_BACK_PER_SLOT = 16
"""Results kept until an earlier line is done, as a multiple of the lines in flight: bounds memory, and what a crash can lose."""


async def run_lines(
    lines: AsyncIterator[BatchLine],
    answer: Callable[[BatchLine], Awaitable[Result]],
    write: Callable[[Sequence[Result]], None],
    *,
    concurrency: int,
    ordered: bool,
) -> None:
    """Answers every line, at most `concurrency` at a time, and gives results to `write` as soon as they may go out.

    Args:
      answer: whatever it raises ends the run; a line's own failure is a `Result`.
      ordered: keep the order of the lines, so a result waits for all earlier ones.
    """
    reading: asyncio.Task[BatchLine | None] | None = asyncio.ensure_future(anext(lines, None))
    running: dict[asyncio.Task[Result], int] = {}
    finished: dict[int, Result] = {}
    num_started = num_written = 0
    try:
        while reading is not None or running:
            has_room = len(running) < concurrency and num_started - num_written < HELD_BACK_PER_SLOT * concurrency
            awaited: set[asyncio.Task[Any]] = {*running, *([reading] if reading is not None and has_room else [])}
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if reading in done:
                line = reading.result()
                reading = None
                if line is not None:
                    running[asyncio.ensure_future(answer(line))] = num_started
                    num_started += 1
                    reading = asyncio.ensure_future(anext(lines, None))
            for task in [task for task in running if task in done]:
                finished[running.pop(task)] = task.result()
            ready = _take_run(finished, num_written) if ordered else [finished.pop(place) for place in sorted(finished)]
            if ready:
                num_written += len(ready)
                write(ready)
    finally:
        unfinished: list[asyncio.Task[Any]] = [*running, *([reading] if reading is not None else [])]
        for unneeded in unfinished:
            unneeded.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


def _take_run(finished: dict[int, Result], start: int) -> list[Result]:
    """Removes the unbroken run of results that begins at `start`."""
    ready = []
    while start in finished:
        ready.append(finished.pop(start))
        start += 1
    return ready


async def from_thread(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterates in a thread, a little ahead, so that a pipe with nothing in it does not hold up the event loop."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[T | _End] = asyncio.Queue()
    room, closed = threading.Semaphore(LINES_READ_AHEAD), threading.Event()

    def put(item: T | _End) -> bool:
        """False when nobody waits for it any more."""
        room.acquire()
        if closed.is_set():
            return False
        with suppress(RuntimeError):  # the loop was closed a moment ago
            loop.call_soon_threadsafe(queue.put_nowait, item)
        return True

    def read() -> None:
        error: Exception | None = None
        try:
            for item in items:
                if not put(item):
                    return
        except Exception as raised:
            error = raised
        put(_End(error))

    # A daemon: when the run ends early, the thread may be stuck in a read that nothing can interrupt.
    threading.Thread(target=read, name="batch-input", daemon=True).start()
    try:
        while not isinstance(item := await queue.get(), _End):
            room.release()
            yield item
    finally:
        closed.set()
        room.release()
    if item.error is not None:
        raise item.error


class _End:
    """Stands after the last item; holds the error that ended the iteration early."""

    def __init__(self, error: Exception | None):
        self.error = error
