"""The second and third phase: attention of tokens that are alone in their sequence, and of those that are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import Phase, phase_buffers
from tpu_serve.kernels.ragged_paged_attention.problem import Problem
from tpu_serve.kernels.ragged_paged_attention.softmax import Softmax
from tpu_serve.kernels.ragged_paged_attention.stream import Ahead, Stream
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk


@dataclass(frozen=True)
class Attention:
    """A phase over its stream.

    Attributes:
      out: results in HBM. written: semaphores of the two tiles that may be on their way there.
    """

    problem: Problem
    phase: Phase
    blocks: Walk
    stream: Stream
    softmax: Softmax
    out: Any
    written: Any

    def _out_copy(self, tile: Any) -> Any:
        slot = jax.lax.rem(tile, 2)
        if self.phase.is_decode:
            target, source = self.out.at[tile], self.softmax.held["out"].at[slot, :, 0]
        else:
            first = pl.multiple_of(tile * self.phase.tile, self.phase.tile)
            target, source = self.out.at[:, :, pl.ds(first, self.phase.tile)], self.softmax.held["out"].at[slot]
        return pltpu.make_async_copy(source, target, self.written.at[slot])

    def _block(self, at: Unit, step: Any, first_tile: Any) -> None:
        blocks, softmax = self.blocks, self.softmax

        @pl.when(blocks.begins_tile(at))
        def _() -> None:
            self.stream.wait_queries(at)
            softmax.begin()

        self.stream.wait(at, step)
        slot, queries = jax.lax.rem(step, self.phase.ring), jax.lax.rem(at.tile, self.phase.ring)
        sees_all = softmax.sees_all(at, blocks)
        pl.when(sees_all)(lambda: softmax.add(slot, queries, None))
        pl.when(~sees_all)(lambda: softmax.add(slot, queries, softmax.seen(at, blocks)))

        @pl.when(blocks.ends_tile(at))
        def _() -> None:
            pl.when(at.tile - first_tile >= 2)(lambda: self._out_copy(at.tile).wait())
            softmax.finish(jax.lax.rem(at.tile, 2))
            self._out_copy(at.tile).start()

    def run(self) -> None:
        """All tiles of the phase."""
        first = self.blocks.first_unit()

        def body(carry: tuple[Any, Unit, Ahead]) -> tuple[Any, Unit, Ahead]:
            step, at, ahead = carry
            ahead = self.stream.fetch(ahead, step + self.phase.ring - 1)
            self._block(at, step, first.tile)
            return step + 1, self.blocks.next(at), ahead

        jax.lax.while_loop(lambda carry: self.blocks.exists(carry[1]), body, (jnp.int32(0), first, self.stream.start()))
        stop = jnp.where(self.blocks.begin < self.blocks.end, jax.lax.div(self.blocks.end - 1, self.phase.tile) + 1, 0)
        jax.lax.fori_loop(jnp.maximum(stop - 2, first.tile), stop, lambda tile, _: self._out_copy(tile).wait(), None)


def phase_scratch(problem: Problem, phase: Phase) -> dict[str, Any]:
    """Pallas scratch of a phase: its buffers, and a semaphore for each slot of a ring."""
    held = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in phase_buffers(problem, phase).items()}
    ring = pltpu.SemaphoreType.DMA((phase.ring,))
    return held | {"arrived": ring, "queries_arrived": ring, "written": pltpu.SemaphoreType.DMA((2,))}
