"""Work on several heads, written one by one and done in turn: the matrix units then have something to do while a head waits for its last product."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""What is to be done for one of them, in steps."""


def in_turn(works: Sequence[Steps[T]]) -> list[T]:
    """The results of all, of which each does a step before any does the next."""
    results: dict[int, T] = {}
    while len(results) < len(works):
        for index, work in enumerate(works):
            if index not in results:
                try:
                    next(work)
                except StopIteration as end:
                    results[index] = end.value
    return [results[index] for index in range(len(works))]
