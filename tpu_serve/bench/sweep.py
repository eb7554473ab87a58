"""Which cases a benchmark runs and how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Every prompt length with every batch size, each `num_warmup` times unmeasured and `num_iters` times measured.

    Attributes:
      chunks: most tokens of a step, one after the other; None for the engine's own limit.
    """

    input_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    num_iters: int
    num_warmup: int
    chunks: tuple[int | None, ...] = (None,)

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(prompt length, batch size) in the order of the table."""
        return [(input_len, batch_size) for input_len in self.input_lens for batch_size in self.batch_sizes]

    @property
    def num_runs(self) -> int:
        return len(self.chunks) * len(self.cases) * (self.num_iters + self.num_warmup)

    def measure(self, run: Callable[[], T], on_run: Callable[[], None]) -> list[T]:
        """Calls `run` for warming up, then for the record."""
        results = []
        for _ in range(self.num_warmup + self.num_iters):
            results.append(run())
            on_run()
        return results[self.num_warmup :]
