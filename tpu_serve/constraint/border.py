"""Constraints on their way to the process that follows them.

What a grammar has compiled to cannot leave its process, so its text goes, and is compiled there once more. The other constraints are
plain data. Only a process of the same program may be given what is made here: it is pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from tpu_serve.constraint.grammar import Grammar
from tpu_serve.request import Constraint


def packed(constraint: Constraint) -> bytes:
    """A constraint that has accepted nothing yet."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(constraint)
    return buffer.getvalue()


def unpacked(data: bytes, compiled: Callable[[str], Grammar]) -> Constraint:
    """The constraint again.

    Args:
      compiled: a grammar of a text in Lark that compiled before. What it raises is raised.
    """
    constraint: Constraint = _Unpickler(data, compiled).load()
    return constraint


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> str | None:
        return item.source if isinstance(item, Grammar) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, compiled: Callable[[str], Grammar]):
        super().__init__(io.BytesIO(data))
        self._compiled = compiled

    def persistent_load(self, source: str) -> Grammar:
        return self._compiled(source)
