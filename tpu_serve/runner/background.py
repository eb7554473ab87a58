"""Threads that do a start's work beside it. A process must not end under one of them: the compiler does not survive that.

This module imports no jax, so that whoever ends the process can ask whether it may.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_threads: set[threading.Thread] = set()
_lock = threading.Lock()
_is_registered = False


def start(function: Callable[[], None], name: str) -> None:
    """Runs a function in a thread that keeps nobody from ending the process with `leave`; an ordinary exit waits for it."""
    global _is_registered

    def run() -> None:
        try:
            function()
        finally:
            with _lock:
                _threads.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _lock:
        if not _is_registered:  # after jax has registered what it tears down, so that the threads end before
            atexit.register(_join)
            _is_registered = True
        _threads.add(thread)
    thread.start()


def is_running() -> bool:
    """Whether any of the threads is alive."""
    with _lock:
        return bool(_threads)


def leave(code: int) -> NoReturn:
    """Ends the process now, whatever such threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join() -> None:
    while is_running():
        with _lock:
            threads = list(_threads)
        for thread in threads:
            thread.join()
