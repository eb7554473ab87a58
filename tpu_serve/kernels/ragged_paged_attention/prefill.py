"""The third phase: tokens that are not alone in their sequence, in tiles, against blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import Config, prefill_buffers
from tpu_serve.kernels.ragged_paged_attention.problem import Problem, round_up
from tpu_serve.kernels.ragged_paged_attention.softmax import Softmax
from tpu_serve.kernels.ragged_paged_attention.stream import Ahead, Stream
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk


@dataclass(frozen=True)
class Prefill:
    """The phase over its stream.

    Attributes:
      out: results in HBM.
      written: semaphores of the two tiles that may be on their way there.
    """

    problem: Problem
    config: Config
    blocks: Walk
    stream: Stream
    softmax: Softmax
    out: Any
    written: Any

    def _out_copy(self, tile: Any, slot: Any) -> Any:
        size = self.config.query_tile
        target = self.out.at[pl.ds(pl.multiple_of(tile * size, size), size)]
        return pltpu.make_async_copy(self.softmax.held["out"].at[slot], target, self.written.at[slot])

    def _block(self, at: Unit, step: Any, first_tile: Any) -> None:
        blocks, softmax, ring = self.blocks, self.softmax, self.config.prefill_ring

        @pl.when(blocks.begins_tile(at))
        def _() -> None:
            self.stream.wait_queries(at)
            softmax.begin()

        self.stream.wait(at, step)
        slot, queries = jax.lax.rem(step, ring), jax.lax.rem(at.tile, ring)
        sees_all = softmax.sees_all(at, blocks)
        pl.when(sees_all)(lambda: softmax.add(slot, queries, None))
        pl.when(~sees_all)(lambda: softmax.add(slot, queries, softmax.seen(at, blocks)))

        @pl.when(blocks.ends_tile(at))
        def _() -> None:
            slot = jax.lax.rem(at.tile, 2)
            pl.when(at.tile - first_tile >= 2)(lambda: self._out_copy(at.tile, slot).wait())
            softmax.finish(slot)
            self._out_copy(at.tile, slot).start()

    def run(self) -> None:
        """All tiles of the phase, and zeros behind them."""
        first, tile = self.blocks.first_unit(), self.config.query_tile

        def body(carry: tuple[Any, Unit, Ahead]) -> tuple[Any, Unit, Ahead]:
            step, at, ahead = carry
            ahead = self.stream.fetch(ahead, step + self.config.prefill_ring - 1)
            self._block(at, step, first.tile)
            return step + 1, self.blocks.next(at), ahead

        jax.lax.while_loop(lambda carry: self.blocks.exists(carry[1]), body, (jnp.int32(0), first, self.stream.start()))
        stop = jnp.where(self.blocks.begin < self.blocks.end, jax.lax.div(self.blocks.end - 1, tile) + 1, 0)
        wait = lambda at, _: self._out_copy(at, jax.lax.rem(at, 2)).wait()  # noqa: E731
        jax.lax.fori_loop(jnp.maximum(stop - 2, first.tile), stop, wait, None)
        num_tiles = round_up(self.problem.num_tokens, tile) // tile

        @pl.when(stop < num_tiles)
        def _() -> None:
            self.softmax.held["out"][0] = jnp.zeros(self.softmax.held["out"].shape[1:], self.problem.dtype)
            jax.lax.fori_loop(stop, num_tiles, lambda at, _: self._out_copy(at, 0).start(), None)
            jax.lax.fori_loop(stop, num_tiles, lambda at, _: self._out_copy(at, 0).wait(), None)


def prefill_scratch(problem: Problem, config: Config) -> dict[str, Any]:
    """Pallas scratch of the phase: its buffers, and a semaphore for each slot of a ring."""
    buffers = prefill_buffers(problem, config)
    held = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in buffers.items()}
    ring = pltpu.SemaphoreType.DMA((config.prefill_ring,))
    return held | {"arrived": ring, "queries_arrived": ring, "written": pltpu.SemaphoreType.DMA((2,))}
