"""The first phase for tokens that are not alone in their sequence: their keys and values go into their pages.

A page can be cut at granules only, so what lies beside the new tokens in their first and last granule is read before it is written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import WRITE_RING, write_buffers
from tpu_serve.kernels.ragged_paged_attention.problem import Problem

LOOK_AHEAD = WRITE_RING // 2
"""Segments that are read ahead. The others of the ring have as long to be written before they are read into again."""


class Segment(NamedTuple):
    """New tokens of one sequence that lie in one segment of a page, scalars.

    Attributes:
      token, row: the first of them, in T, and its sequence.
    """

    token: Any
    row: Any


class Place(NamedTuple):
    """Where a segment lies, scalars.

    Attributes:
      page: its page.
      base: first token of the segment within the page.
      offset, count: where the new tokens begin in the segment, and how many they are.
      first, size: whole granules around them, in tokens of the segment.
      token: the first of them in T.
      source, source_size: whole granules around them in T.
    """

    page: Any
    base: Any
    offset: Any
    count: Any
    first: Any
    size: Any
    token: Any
    source: Any
    source_size: Any


def _down(value: Any, multiple: int) -> Any:
    return pl.multiple_of(jax.lax.div(value, multiple) * multiple, multiple)


def _up(value: Any, multiple: int) -> Any:
    return _down(value + (multiple - 1), multiple)


@dataclass(frozen=True)
class Writer:
    """Refs of the phase; `pages`, `new`, `scales` and `new_scales` are in HBM, `held` in VMEM.

    Attributes:
      starts, index: i32[S + 1] and i32[T] in SMEM: where sequences begin in T, and where each token goes in the cache.
      counts: i32[2] in SMEM, tokens in front that are alone in their sequence, and all tokens.
      arrived, written: semaphores of the ring.
      unwritten: i32[ring] in SMEM, tokens of each slot that are on their way to the cache.
    """

    problem: Problem
    starts: Any
    index: Any
    counts: Any
    pages: Any
    new: Any
    scales: Any
    new_scales: Any
    held: dict[str, Any]
    arrived: Any
    written: Any
    unwritten: Any

    def place(self, at: Segment) -> Place:
        p = self.problem
        index = self.index[jnp.minimum(at.token, p.num_tokens - 1)]
        within = jax.lax.rem(index, p.page_size)
        offset = jax.lax.rem(within, p.segment)
        left = self.starts[jnp.minimum(at.row, p.num_rows - 1) + 1] - at.token
        count = jnp.minimum(p.segment - offset, left)
        first, source = _down(offset, p.granule), _down(at.token, p.granule)
        size, source_size = _up(offset + count, p.granule) - first, _up(at.token + count, p.granule) - source
        return Place(
            jax.lax.div(index, p.page_size), pl.multiple_of(within - offset, p.segment), offset, count,
            first, pl.multiple_of(size, p.granule), at.token, source, pl.multiple_of(source_size, p.granule),
        )  # fmt: skip

    def next(self, at: Segment) -> Segment:
        token = at.token + self.place(at).count
        done = token >= self.starts[jnp.minimum(at.row, self.problem.num_rows - 1) + 1]
        return Segment(token, at.row + jnp.where(done, 1, 0))

    def exists(self, at: Segment) -> Any:
        return at.token < self.counts[1]

    def _copies(self, place: Place, slot: Any, semaphore: Any, outward: bool) -> list[Any]:
        """Between a segment of the cache and its slot."""
        inside = self.held["pages"].at[slot, :, pl.ds(place.first, place.size)]
        begin = pl.multiple_of(place.base + place.first, self.problem.granule)
        pairs = [(self.pages.at[place.page, :, pl.ds(begin, place.size)], inside)]
        if self.scales is not None:
            scales = self.scales.at[place.page, :, :, pl.ds(place.base, self.problem.segment)]
            pairs.append((scales, self.held["scales"].at[slot]))
        ends = [(here, there) if outward else (there, here) for there, here in pairs]
        return [pltpu.make_async_copy(source, target, semaphore) for source, target in ends]

    def _new(self, place: Place, slot: Any) -> list[Any]:
        p = self.problem
        target = self.held["new"].at[slot, :, pl.ds(p.granule, place.source_size)]
        semaphore = self.arrived.at[slot]
        copies = [pltpu.make_async_copy(self.new.at[:, pl.ds(place.source, place.source_size)], target, semaphore)]
        if self.scales is not None:
            lanes = pl.ds(_down(place.source, p.segment), 2 * p.segment)
            source = self.new_scales.at[:, :, lanes]
            copies.append(pltpu.make_async_copy(source, self.held["new_scales"].at[slot], semaphore))
        return copies

    def _is_partial(self, place: Place) -> Any:
        """Whether something else lies in the same granules, or among the same scales."""
        p = self.problem
        if p.stored is not None:
            return place.count < p.segment
        return (place.offset != place.first) | (place.count != place.size)

    def fetch(self, place: Place, slot: Any) -> None:
        """Starts reading what the slot needs, once what it held before has been written."""
        self.wait_written(slot)
        for copy in self._new(place, slot):
            copy.start()

        @pl.when(self._is_partial(place))
        def _() -> None:
            for copy in self._copies(place, slot, self.arrived.at[slot], False):
                copy.start()

    def wait_written(self, slot: Any) -> None:
        """Waits for what is on its way from the slot to the cache, if anything."""
        size = pl.multiple_of(self.unwritten[slot], self.problem.granule)

        @pl.when(size > 0)
        def _() -> None:
            done = self.held["pages"].at[slot, :, pl.ds(0, size)]
            pltpu.make_async_copy(done, done, self.written.at[slot]).wait()
            if self.scales is not None:
                done = self.held["scales"].at[slot]
                pltpu.make_async_copy(done, done, self.written.at[slot]).wait()
            self.unwritten[slot] = 0

    def write(self, place: Place, slot: Any) -> None:
        """Puts the new tokens among what was read, and starts writing."""
        for copy in self._new(place, slot):
            copy.wait()

        @pl.when(self._is_partial(place))
        def _() -> None:
            for copy in self._copies(place, slot, self.arrived.at[slot], False):
                copy.wait()

        self._blend(place, slot)
        if self.scales is not None:
            self._blend_scales(place, slot)
        for copy in self._copies(place, slot, self.written.at[slot], True):
            copy.start()
        self.unwritten[slot] = place.size

    def _blend(self, place: Place, slot: Any) -> None:
        p, pages, new = self.problem, self.held["pages"], self.held["new"]
        tall = p.granule
        # Token r of the segment is row `behind` + r of the new ones, which have a granule of anything before them.
        behind = tall + place.token - place.source - place.offset
        shift = jax.lax.rem(behind + p.segment, tall)  # a multiple of granules keeps it from being negative
        row = jax.lax.broadcasted_iota(jnp.int32, (tall, p.lanes), 0)

        def one(step: Any, _: None) -> None:
            at = pl.multiple_of(place.first + step * tall, tall)
            is_new = (row >= place.offset - at) & (row < place.offset + place.count - at)
            source = _down(behind + at, tall)
            for head in range(p.num_kv_heads):
                both = new[slot, head, pl.ds(source, 2 * tall)].astype(jnp.float32)
                both = pltpu.roll(both, jax.lax.rem(2 * tall - shift, 2 * tall), 0)
                old = pages[slot, head, pl.ds(at, tall)]
                values = jnp.where(is_new, both[:tall], old.astype(jnp.float32))
                pages[slot, head, pl.ds(at, tall)] = values.astype(old.dtype)

        jax.lax.fori_loop(0, jax.lax.div(place.size, tall), one, None)

    def _blend_scales(self, place: Place, slot: Any) -> None:
        p = self.problem
        wide = 2 * p.segment
        lane = jax.lax.broadcasted_iota(jnp.int32, (2, p.segment), 1)
        is_new = (lane >= place.offset) & (lane < place.offset + place.count)
        behind = place.token - _down(place.source, p.segment) - place.offset
        shift = jax.lax.rem(2 * wide - behind, wide)
        for head in range(p.num_kv_heads):
            moved = pltpu.roll(self.held["new_scales"][slot, head], shift, 1)[:, : p.segment]
            self.held["scales"][slot, head] = jnp.where(is_new, moved, self.held["scales"][slot, head])

    def run(self) -> None:
        """All of it: when this returns the cache holds this step's keys and values."""
        first = Segment(self.counts[0], self.counts[0])
        for slot in range(WRITE_RING):
            self.unwritten[slot] = 0

        def ahead(step: Any, at: Segment) -> Segment:
            @pl.when(self.exists(at))
            def _() -> None:
                self.fetch(self.place(at), jax.lax.rem(step, WRITE_RING))

            return Segment(*jax.tree.map(lambda new, old: jnp.where(self.exists(at), new, old), self.next(at), at))

        def body(carry: tuple[Any, Segment, Segment]) -> tuple[Any, Segment, Segment]:
            step, at, fetched = carry
            self.write(self.place(at), jax.lax.rem(step, WRITE_RING))
            return step + 1, self.next(at), ahead(step + LOOK_AHEAD, fetched)

        fetched = jax.lax.fori_loop(0, LOOK_AHEAD, ahead, first)
        jax.lax.while_loop(lambda carry: self.exists(carry[1]), body, (jnp.int32(0), first, fetched))

        def drain(slot: Any, _: None) -> None:
            self.wait_written(slot)

        jax.lax.fori_loop(0, WRITE_RING, drain, None)


def write_scratch(problem: Problem) -> dict[str, Any]:
    """Pallas scratch of the phase's buffers."""
    return {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in write_buffers(problem).items()}
