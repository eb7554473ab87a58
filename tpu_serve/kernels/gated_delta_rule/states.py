"""Copies of states between HBM and VMEM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True)
class States:
    """The states of a block of heads.

    Attributes:
      pool: [rows of state, Hv, Dk, Dv] in HBM.
      buffer: [slots, heads, Dk, Dv] in VMEM.
      arrived, left, copied: semaphores, for each slot, for each slot, and of the snapshots.
      heads: those of the block.
      read, write, snapshot: i32[S] in SMEM.
    """

    pool: Any
    buffer: Any
    arrived: Any
    left: Any
    copied: Any
    heads: Any
    read: Any
    write: Any
    snapshot: Any

    def held(self, slot: Any) -> Any:
        return self.buffer.at[slot]

    def load(self, row: Any, slot: Any) -> None:
        """Starts to bring what `row` starts from; zeros need no copy."""
        pl.when(self.read[row] >= 0)(self._incoming(row, slot).start)

    def wait_loaded(self, row: Any, slot: Any) -> None:
        pl.when(self.read[row] >= 0)(self._incoming(row, slot).wait)

        @pl.when(self.read[row] < 0)
        def _() -> None:
            self.buffer[slot] = jnp.zeros(self.buffer.shape[1:], self.buffer.dtype)

    def store(self, row: Any, slot: Any) -> None:
        """Starts to take the state of `row` to where it belongs."""
        pl.when(self._is_kept(self.write[row]))(self._outgoing(row, slot).start)

    def wait_stored(self, row: Any, slot: Any) -> None:
        pl.when(self._is_kept(self.write[row]))(self._outgoing(row, slot).wait)

    def start_snapshot(self, row: Any) -> None:
        """Starts to copy the state of `row`, which has been stored."""
        pl.when(self._has_snapshot(row))(self._copy(row).start)

    def wait_snapshot(self, row: Any) -> None:
        pl.when(self._has_snapshot(row))(self._copy(row).wait)

    def _is_kept(self, target: Any) -> Any:
        return (target >= 0) & (target < self.pool.shape[0])

    def _has_snapshot(self, row: Any) -> Any:
        return self._is_kept(self.snapshot[row]) & self._is_kept(self.write[row])

    def _incoming(self, row: Any, slot: Any) -> Any:
        source = self.pool.at[jnp.maximum(self.read[row], 0), self.heads]
        return pltpu.make_async_copy(source, self.buffer.at[slot], self.arrived.at[slot])

    def _outgoing(self, row: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(
            self.buffer.at[slot], self.pool.at[self.write[row], self.heads], self.left.at[slot]
        )

    def _copy(self, row: Any) -> Any:
        source, target = self.pool.at[self.write[row], self.heads], self.pool.at[self.snapshot[row], self.heads]
        return pltpu.make_async_copy(source, target, self.copied)
