"""Counts every program that JAX compiles in this process, whoever asked for it."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_count = _hits = 0
_seconds = 0.0


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    global _count, _seconds
    if event == _EVENT:
        _count, _seconds = _count + 1, _seconds + duration_secs


def _on_hit(event: str, **_: object) -> None:
    global _hits
    _hits += event == _HIT


jax.monitoring.register_event_duration_secs_listener(_on_event)
jax.monitoring.register_event_listener(_on_hit)


def num_compiled() -> int:
    """Programs compiled, or fetched from the persistent cache, since this module was imported."""
    return _count


def num_cache_hits() -> int:
    """Those of them that came from the persistent cache."""
    return _hits


def compile_seconds() -> float:
    """Time that compiling them took, fetching included, of all threads."""
    return _seconds
