"""What a phase of attention reads: pieces of page tables into scalar memory, and with them pages and queries into vector memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import TABLE_RING, Phase
from tpu_serve.kernels.ragged_paged_attention.problem import TABLE_CHUNK, Problem, ceil_div
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk


class Ahead(NamedTuple):
    """How far reading has come, scalars.

    Attributes:
      block: the next block to ask for.
      chunk: number of the piece of a page table that the block before it was in, counted from the beginning; -1 before the first.
      table: the next piece of a page table to ask for.
    """

    block: Unit
    chunk: Any
    table: Unit


@dataclass(frozen=True)
class Stream:
    """Refs of what a phase reads.

    Attributes:
      blocks, chunks: the order of blocks of pages, and of pieces of page tables.
      tables: i32[S * C, 1, 128] in HBM, C pieces for each sequence. pages, scales, queries: in HBM.
      table: i32[ring, 1, 128] in SMEM. held: in VMEM, see `config.phase_buffers`.
      table_arrived, arrived, queries_arrived: semaphores of the rings.
    """

    problem: Problem
    phase: Phase
    blocks: Walk
    chunks: Walk
    tables: Any
    pages: Any
    scales: Any
    queries: Any
    table: Any
    held: dict[str, Any]
    table_arrived: Any
    arrived: Any
    queries_arrived: Any

    def start(self) -> Ahead:
        """Asks for the first page tables and for as many blocks as the ring takes, but for one."""

        def table(step: Any, at: Unit) -> Unit:
            return self._fetch_table(at, step)

        ahead = jax.lax.fori_loop(0, TABLE_RING - 1, table, self.chunks.first_unit())
        first = Ahead(self.blocks.first_unit(), jnp.int32(-1), ahead)
        return jax.lax.fori_loop(0, self.phase.ring - 1, lambda step, at: self.fetch(at, step), first)

    def _table_copy(self, at: Unit, slot: Any) -> Any:
        chunk = at.row * ceil_div(self.problem.max_pages, TABLE_CHUNK) + at.piece
        return pltpu.make_async_copy(self.tables.at[chunk], self.table.at[slot], self.table_arrived.at[slot])

    def _fetch_table(self, at: Unit, step: Any) -> Unit:
        @pl.when(self.chunks.exists(at))
        def _() -> None:
            self._table_copy(at, jax.lax.rem(step, TABLE_RING)).start()

        return self.chunks.next(at)

    def fetch(self, ahead: Ahead, step: Any) -> Ahead:
        """Asks for the next block, if there is one, as the `step`-th of all; waits for its page table and asks for one more."""
        at, blocks = ahead.block, self.blocks
        exists = blocks.exists(at)
        per_chunk = TABLE_CHUNK // self.phase.pages
        begins = (at.piece == blocks.first_piece(at)) | (jax.lax.rem(at.piece, per_chunk) == 0)
        entered = exists & begins
        chunk = ahead.chunk + jnp.where(entered, 1, 0)

        def enter(table: Unit) -> Unit:
            self._table_copy(table._replace(row=0, piece=0), jax.lax.rem(chunk, TABLE_RING)).wait()
            return self._fetch_table(table, chunk + TABLE_RING - 1)

        table = jax.lax.cond(entered, enter, lambda table: table, ahead.table)

        @pl.when(exists)
        def _() -> None:
            slot = jax.lax.rem(step, self.phase.ring)
            first, stop = self._range(at)
            begin = jax.lax.rem(at.piece, per_chunk) * self.phase.pages
            entries = self.table.at[jax.lax.rem(chunk, TABLE_RING)]

            def page(index: Any, _: None) -> None:
                number = entries[0, begin + index]
                pltpu.make_async_copy(
                    self.pages.at[number], self.held["pages"].at[slot, index], self.arrived.at[slot]
                ).start()
                if self.scales is not None:
                    pltpu.make_async_copy(
                        self.scales.at[number], self.held["scales"].at[slot, index], self.arrived.at[slot]
                    ).start()

            jax.lax.fori_loop(first, stop, page, None)
            pl.when(blocks.begins_tile(at))(lambda: self._queries_copy(at).start())

        return Ahead(blocks.next(at), chunk, table)

    def _range(self, at: Unit) -> tuple[Any, Any]:
        """Pages of a block, by their place in it, that hold keys that are seen: from the first to before the second. At least one."""
        size, pages = self.problem.page_size, self.phase.pages
        first = jax.lax.div(self.blocks.first_key(at), size) - at.piece * pages
        stop = jax.lax.div(at.end - 1 + at.shift, size) + 1 - at.piece * pages
        return jnp.maximum(first, 0), jnp.minimum(stop, pages)

    def _queries_copy(self, at: Unit) -> Any:
        slot = jax.lax.rem(at.tile, self.phase.ring)
        if self.phase.is_decode:
            source, target = self.queries.at[at.tile], self.held["queries"].at[slot, :, 0]
        else:
            first = pl.multiple_of(at.tile * self.phase.tile, self.phase.tile)
            source, target = self.queries.at[:, :, pl.ds(first, self.phase.tile)], self.held["queries"].at[slot]
        return pltpu.make_async_copy(source, target, self.queries_arrived.at[slot])

    def wait(self, at: Unit, step: Any) -> None:
        """Waits for a block's pages."""
        slot = jax.lax.rem(step, self.phase.ring)
        first, stop = self._range(at)
        for name in ("pages",) if self.scales is None else ("pages", "scales"):
            arrived = self.held[name].at[slot, pl.ds(0, stop - first)]
            pltpu.make_async_copy(arrived, arrived, self.arrived.at[slot]).wait()

    def wait_queries(self, at: Unit) -> Any:
        """Waits for the queries of a unit's tile.

        Returns:
          their slot.
        """
        self._queries_copy(at).wait()
        return jax.lax.rem(at.tile, self.phase.ring)
