"""The first phase for tokens that are alone in their sequence: each goes into a granule of its page, several at a time.

No two sequences that go on write to one page. Rows that have stopped (`runner/multi_step.py`) all write to the padding page, in any order and
over one another: what is there is finite whoever comes last, only such rows read it, and their results are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import TOKENS_AT_A_TIME, TOKENS_RING, write_decode_buffers
from tpu_serve.kernels.ragged_paged_attention.problem import Problem

AHEAD = TOKENS_RING // 2
"""Batches of tokens whose granules are read ahead. The others of the ring have as long to be written before they are read into again."""


@dataclass(frozen=True)
class TokenWriter:
    """Refs of the phase; `pages`, `scales` and what is new are in HBM.

    Attributes:
      index: i32[T] in SMEM, where each token goes in the cache.
      count: tokens.
      held: in VMEM, see `config.write_decode_buffers`, and semaphores: "arrived" and "written" of the ring, "moved" of what is new.
    """

    problem: Problem
    index: Any
    count: Any
    pages: Any
    new: Any
    scales: Any
    new_scales: Any
    held: dict[str, Any]

    def _places(self, token: Any, slot: Any, index: int) -> list[tuple[Any, Any]]:
        """(in HBM, in VMEM) of what is read and written for a token."""
        p = self.problem
        place = self.index[jnp.minimum(token, p.num_tokens - 1)]
        page, within = jax.lax.div(place, p.page_size), jax.lax.rem(place, p.page_size)
        begin = pl.multiple_of(jax.lax.div(within, p.granule) * p.granule, p.granule)
        found = [(self.pages.at[page, :, pl.ds(begin, p.granule)], self.held["pages"].at[slot, index])]
        if self.scales is not None:
            begin = pl.multiple_of(jax.lax.div(within, p.segment) * p.segment, p.segment)
            found.append((self.scales.at[page, :, :, pl.ds(begin, p.segment)], self.held["scales"].at[slot, index]))
        return found

    def _start(self, batch: Any, slot: Any, outward: bool) -> None:
        semaphore = self.held["written" if outward else "arrived"].at[slot]
        for index in range(TOKENS_AT_A_TIME):
            token = batch * TOKENS_AT_A_TIME + index

            @pl.when(token < self.count)
            def _(token: Any = token, index: int = index) -> None:
                for there, here in self._places(token, slot, index):
                    ends = (here, there) if outward else (there, here)
                    pltpu.make_async_copy(*ends, semaphore).start()

    def _wait(self, batch: Any, slot: Any, name: str) -> None:
        count = jnp.minimum(self.count - batch * TOKENS_AT_A_TIME, TOKENS_AT_A_TIME)
        for held in ("pages",) if self.scales is None else ("pages", "scales"):
            moved = self.held[held].at[slot, pl.ds(0, count)]
            pltpu.make_async_copy(moved, moved, self.held[name].at[slot]).wait()

    def _blend(self, batch: Any, slot: Any) -> None:
        """Puts a batch's tokens among what was read."""
        p, held = self.problem, self.held
        row = jax.lax.broadcasted_iota(jnp.int32, (p.granule, p.lanes), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (2, p.segment), 1)
        for index in range(TOKENS_AT_A_TIME):
            token = jnp.minimum(batch * TOKENS_AT_A_TIME + index, p.num_decodes - 1)
            within = jax.lax.rem(self.index[token], p.page_size)
            for head in range(p.num_kv_heads):
                new = held["new"][pl.ds(token * p.num_kv_heads + head, 1)]
                old = held["pages"][slot, index, head]
                values = jnp.where(row == jax.lax.rem(within, p.granule), new, old.astype(jnp.float32))
                held["pages"][slot, index, head] = values.astype(old.dtype)
                if self.scales is not None:
                    is_new = lane == jax.lax.rem(within, p.segment)
                    old = held["scales"][slot, index, head]
                    held["scales"][slot, index, head] = jnp.where(is_new, held["new_scales"][token, head], old)

    def run(self) -> None:
        """All of it: when this returns the cache holds these tokens' keys and values."""
        pl.when(self.count > 0)(self._run)

    def _run(self) -> None:
        news = [(self.new, self.held["new"])]
        if self.scales is not None:
            news.append((self.new_scales, self.held["new_scales"]))
        copies = [pltpu.make_async_copy(*ends, self.held["moved"]) for ends in news]
        for copy in copies:
            copy.start()
        number = jax.lax.div(self.count + TOKENS_AT_A_TIME - 1, TOKENS_AT_A_TIME)

        def fetch(batch: Any, _: None = None) -> None:
            slot = jax.lax.rem(batch, TOKENS_RING)
            pl.when((batch >= TOKENS_RING) & (batch < number))(lambda: self._wait(batch - TOKENS_RING, slot, "written"))
            self._start(batch, slot, False)

        jax.lax.fori_loop(0, AHEAD, fetch, None)
        for copy in copies:
            copy.wait()

        def body(batch: Any, _: None) -> None:
            fetch(batch + AHEAD)
            slot = jax.lax.rem(batch, TOKENS_RING)
            self._wait(batch, slot, "arrived")
            self._blend(batch, slot)
            self._start(batch, slot, True)

        jax.lax.fori_loop(0, number, body, None)

        def drain(batch: Any, _: None) -> None:
            self._wait(batch, jax.lax.rem(batch, TOKENS_RING), "written")

        jax.lax.fori_loop(jnp.maximum(number - TOKENS_RING, 0), number, drain, None)


def write_decode_scratch(problem: Problem) -> dict[str, Any]:
    """Pallas scratch of the phase."""
    held = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in write_decode_buffers(problem).items()}
    ring = pltpu.SemaphoreType.DMA((TOKENS_RING,))
    return held | {"arrived": ring, "written": ring, "moved": pltpu.SemaphoreType.DMA(())}
