"""Counts every program that JAX compiles in this process, whoever asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_lock = threading.Lock()
_here = threading.local()
_count = _hits = _surprises = 0
_seconds = 0.0


class Watcher:
    """Is told of programs that nobody expected, for as long as somebody holds it."""

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell


_watchers: WeakSet[Watcher] = WeakSet()


def _on_event(event: str, duration_secs: float, **details: Any) -> None:
    global _count, _seconds, _surprises
    if event != _EVENT:
        return
    is_expected = getattr(_here, "depth", 0) > 0
    with _lock:
        _count, _seconds = _count + 1, _seconds + duration_secs
        _surprises += not is_expected
        watchers = [] if is_expected else list(_watchers)
    for watcher in watchers:
        watcher.tell(str(details.get("fun_name", "a program without a name")))


def _on_hit(event: str, **_: object) -> None:
    global _hits
    if event == _HIT:
        _here.hits = num_hits_here() + 1
        with _lock:
            _hits += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)
jax.monitoring.register_event_listener(_on_hit)


@contextmanager
def expected() -> Iterator[None]:
    """What this thread compiles meanwhile belongs to the start of an engine, and surprises nobody."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1


def watch(tell: Callable[[str], None]) -> Watcher:
    """Has `tell` called with the name of every program that is compiled unexpectedly, in the thread that did it, while the result is held."""
    watcher = Watcher(tell)
    with _lock:
        _watchers.add(watcher)
    return watcher


def count_hit() -> None:
    """Counts a program that was compiled before and came from elsewhere than JAX's cache."""
    global _count, _hits
    with _lock:
        _count, _hits = _count + 1, _hits + 1


def num_compiled() -> int:
    """Programs compiled, or fetched from where they are kept, since this module was imported."""
    return _count


def num_cache_hits() -> int:
    """Those of them that were kept from an earlier start."""
    return _hits


def num_hits_here() -> int:
    """Those that JAX's cache had for this thread."""
    return int(getattr(_here, "hits", 0))


def num_unexpected() -> int:
    """Those of them that no start of an engine asked for."""
    return _surprises


def compile_seconds() -> float:
    """Time that compiling them took, fetching included, of all threads."""
    return _seconds
