"""Counts every program that JAX compiles in this process, whoever asked for it."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_on_event)


def num_compiled() -> int:
    """Programs compiled, or fetched from the persistent cache, since this module was imported."""
    return _count
