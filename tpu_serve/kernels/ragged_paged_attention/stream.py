"""What the phase of prompts reads: pages and queries into vector memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import Config
from tpu_serve.kernels.ragged_paged_attention.problem import Problem
from tpu_serve.kernels.ragged_paged_attention.tables import Pointer, Tables
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk


class Ahead(NamedTuple):
    """How far reading has come.

    Attributes:
      block: the next block to ask for.
      pointer: in page tables.
    """

    block: Unit
    pointer: Pointer


@dataclass(frozen=True)
class Stream:
    """Refs of what the phase reads.

    Attributes:
      blocks: the order of blocks of pages.
      tables: page tables.
      pages, scales, queries: in HBM.
      held: in VMEM, see `config.prefill_buffers`, and semaphores: "arrived" of blocks, "queries_arrived" of tiles.
    """

    problem: Problem
    config: Config
    blocks: Walk
    tables: Tables
    pages: Any
    scales: Any
    queries: Any
    held: dict[str, Any]

    def start(self) -> Ahead:
        """Asks for as many blocks as the ring takes, but for one."""
        first = Ahead(self.blocks.first_unit(), self.tables.start())
        return jax.lax.fori_loop(0, self.config.prefill_ring - 1, lambda step, at: self.fetch(at, step), first)

    def fetch(self, ahead: Ahead, step: Any) -> Ahead:
        """Asks for the next block, if there is one, as the `step`-th of all."""
        at, blocks = ahead.block, self.blocks
        exists, is_first = blocks.exists(at), at.piece == blocks.first_piece(at)
        entries, begin, pointer = self.tables.entries(
            ahead.pointer, at.row, at.piece, self.config.prefill_pages, is_first, exists
        )

        @pl.when(exists)
        def _() -> None:
            slot = jax.lax.rem(step, self.config.prefill_ring)

            def page(index: Any, _: None) -> None:
                number = entries[0, begin + index]
                for name, source in (("pages", self.pages), ("scales", self.scales)):
                    if source is not None:
                        target = self.held[name].at[slot, index]
                        pltpu.make_async_copy(source.at[number], target, self.held["arrived"].at[slot]).start()

            jax.lax.fori_loop(*self._range(at), page, None)
            pl.when(blocks.begins_tile(at))(lambda: self._queries_copy(at).start())

        return Ahead(blocks.next(at), pointer)

    def _range(self, at: Unit) -> tuple[Any, Any]:
        """Pages of a block, by their place in it, that hold keys that are seen: from the first to before the second. At least one."""
        size, pages = self.problem.page_size, self.config.prefill_pages
        first = jax.lax.div(self.blocks.first_key(at), size) - at.piece * pages
        stop = jax.lax.div(at.end - 1 + at.shift, size) + 1 - at.piece * pages
        return jnp.maximum(first, 0), jnp.minimum(stop, pages)

    def _queries_copy(self, at: Unit) -> Any:
        slot, tile = jax.lax.rem(at.tile, self.config.prefill_ring), self.config.query_tile
        source = self.queries.at[pl.ds(pl.multiple_of(at.tile * tile, tile), tile)]
        return pltpu.make_async_copy(source, self.held["queries"].at[slot], self.held["queries_arrived"].at[slot])

    def wait(self, at: Unit, step: Any) -> None:
        """Waits for a block's pages."""
        slot = jax.lax.rem(step, self.config.prefill_ring)
        first, stop = self._range(at)
        for name in ("pages",) if self.scales is None else ("pages", "scales"):
            arrived = self.held[name].at[slot, pl.ds(0, stop - first)]
            pltpu.make_async_copy(arrived, arrived, self.held["arrived"].at[slot]).wait()

    def wait_queries(self, at: Unit) -> None:
        """Waits for the queries of a unit's tile."""
        self._queries_copy(at).wait()
