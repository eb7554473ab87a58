"""SIGTERM for commands that have something to tidy up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(Exception):
    """SIGTERM came."""


@contextmanager
def terminable() -> Iterator[None]:
    """Cancels the running task when SIGTERM comes, and makes that `Terminated`. Use it in the main thread's event loop."""
    import asyncio  # not above: help text need not wait for it

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    came = False

    def stop() -> None:
        nonlocal came
        came = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not came:
            raise
        raise Terminated from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
