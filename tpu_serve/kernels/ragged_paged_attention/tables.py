"""Page tables in scalar memory: all of them where they fit, else pieces that are asked for so many sequences ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import TABLE_RING, tables_stay
from tpu_serve.kernels.ragged_paged_attention.problem import TABLE_CHUNK, Problem, ceil_div
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk


class Pointer(NamedTuple):
    """How far the reading of tables has come, scalars.

    Attributes:
      chunk: number of the piece that was entered last, counted from the beginning; -1 before the first.
      table: the next piece to ask for.
    """

    chunk: Any
    table: Unit


@dataclass(frozen=True)
class Tables:
    """Attributes:
    chunks: the order of the pieces.
    tables: i32[S * C, 1, 128], C pieces for each sequence: in SMEM where `config.tables_stay`, else in HBM.
    ring, arrived: i32[ring, 1, 128] in SMEM and its semaphores.
    """

    problem: Problem
    chunks: Walk
    tables: Any
    ring: Any
    arrived: Any

    def start(self) -> Pointer:
        """Asks for the first pieces."""
        first = self.chunks.first_unit()
        if not tables_stay(self.problem):
            first = jax.lax.fori_loop(0, TABLE_RING - 1, lambda step, at: self._fetch(at, step), first)
        return Pointer(jnp.int32(-1), first)

    def _chunk(self, row: Any, piece: Any) -> Any:
        return row * ceil_div(self.problem.max_pages, TABLE_CHUNK) + piece

    def _copy(self, at: Unit, slot: Any) -> Any:
        return pltpu.make_async_copy(
            self.tables.at[self._chunk(at.row, at.piece)], self.ring.at[slot], self.arrived.at[slot]
        )

    def _fetch(self, at: Unit, step: Any) -> Unit:
        @pl.when(self.chunks.exists(at))
        def _() -> None:
            self._copy(at, jax.lax.rem(step, TABLE_RING)).start()

        return self.chunks.next(at)

    def entries(
        self, pointer: Pointer, row: Any, block: Any, pages: int, is_first: Any, exists: Any
    ) -> tuple[Any, Any, Pointer]:
        """Where the numbers of a block of pages lie; waits for them.

        Args:
          row, block: the sequence, and its pages from block * pages on.
          is_first: whether it is the first block of those that are asked for in this row, in the order of `chunks`.
          exists: whether there is this block.

        Returns:
          i32[1, 128] in SMEM, the first of the block in it, and how far reading has come.
        """
        per_chunk = TABLE_CHUNK // pages
        within = jax.lax.rem(block, per_chunk)
        if tables_stay(self.problem):
            row = jnp.minimum(row, self.problem.num_rows - 1)
            block = jnp.where(exists, block, 0)
            return self.tables.at[self._chunk(row, jax.lax.div(block, per_chunk))], within * pages, pointer
        entered = exists & (is_first | (within == 0))
        chunk = pointer.chunk + jnp.where(entered, 1, 0)

        def enter(table: Unit) -> Unit:
            self._copy(table._replace(row=0, piece=0), jax.lax.rem(chunk, TABLE_RING)).wait()
            return self._fetch(table, chunk + TABLE_RING - 1)

        table = jax.lax.cond(entered, enter, lambda table: table, pointer.table)
        return self.ring.at[jax.lax.rem(jnp.maximum(chunk, 0), TABLE_RING)], within * pages, Pointer(chunk, table)
