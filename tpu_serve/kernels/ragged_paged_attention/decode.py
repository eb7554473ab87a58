"""The second phase: tokens that are alone in their sequence.

What such a sequence has cached is cut into pieces of whole pages. A group of pieces, of one sequence or of several, is worked on at once: their
products wait long for their results, and then not one after the other. The pieces of the groups behind it are on their way meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.ragged_paged_attention.config import Config, decode_buffers
from tpu_serve.kernels.ragged_paged_attention.problem import Problem
from tpu_serve.kernels.ragged_paged_attention.products import (
    F32,
    MASKED,
    NOTHING_SEEN,
    bounded,
    keys_and_values,
    product,
    scales_of,
    spread,
)
from tpu_serve.kernels.ragged_paged_attention.tables import Pointer, Tables


class Piece(NamedTuple):
    """Scalars.

    Attributes:
      row: the sequence, and its token.
      number: pages from number * P on.
    """

    row: Any
    number: Any


class Span(NamedTuple):
    """What of a piece is seen, scalars.

    Attributes:
      first_key, length: positions that the token sees.
      begin, stop: pages that hold some of them, by their place in the piece, at least one.
      is_first, is_last: of the sequence's pieces.
    """

    first_key: Any
    length: Any
    begin: Any
    stop: Any
    is_first: Any
    is_last: Any


class State(NamedTuple):
    """The running softmax of each KV head.

    Attributes:
      total: f32[rows, query lanes]. normaliser, highest: f32[rows, lanes], the same in all lanes.
    """

    total: Any
    normaliser: Any
    highest: Any


@dataclass(frozen=True)
class Decode:
    """Refs of the phase.

    Attributes:
      lengths: i32[S] in SMEM. count: sequences, which are the first ones.
      tables: their page tables.
      pages, scales, queries, out: in HBM.
      sinks: f32[K, rows, 128] in VMEM, or None.
      held: in VMEM, see `config.decode_buffers`, and semaphores: "arrived" of the pieces, "moved" of queries and results.
    """

    problem: Problem
    config: Config
    lengths: Any
    count: Any
    tables: Tables
    pages: Any
    scales: Any
    queries: Any
    out: Any
    sinks: Any
    held: dict[str, Any]

    def span(self, at: Piece) -> Span:
        p, pages = self.problem, self.config.decode_pages
        length = self.lengths[jnp.minimum(at.row, p.num_rows - 1)]
        first_key = jnp.int32(0) if p.window is None else jnp.maximum(length - p.window, 0)
        first, last = jax.lax.div(first_key, p.page_size), jax.lax.div(length - 1, p.page_size)
        begin, stop = first - at.number * pages, last + 1 - at.number * pages
        return Span(
            first_key, length, jnp.maximum(begin, 0), jnp.minimum(stop, pages), begin >= 0, stop <= pages
        )  # fmt: skip

    def first_of(self, row: Any) -> Piece:
        if self.problem.window is None:
            return Piece(row, jnp.int32(0))
        length = self.lengths[jnp.minimum(row, self.problem.num_rows - 1)]
        width = self.config.decode_pages * self.problem.page_size
        return Piece(row, jax.lax.div(jnp.maximum(length - self.problem.window, 0), width))

    def next(self, at: Piece, span: Span) -> Piece:
        other = self.first_of(at.row + 1)
        return Piece(
            jnp.where(span.is_last, other.row, at.row), jnp.where(span.is_last, other.number, at.number + 1)
        )  # fmt: skip

    def exists(self, at: Piece) -> Any:
        return at.row < self.count

    def fetch(self, ahead: tuple[Piece, Pointer], slot: Any) -> tuple[Piece, Pointer]:
        """Asks for a piece, if there is one; the next one."""
        at, pointer = ahead
        span, exists = self.span(at), self.exists(at)
        pages = self.config.decode_pages
        entries, begin, pointer = self.tables.entries(pointer, at.row, at.number, pages, span.is_first, exists)
        for index in range(pages):
            number = entries[0, begin + index]

            @pl.when(exists & (span.begin <= index) & (index < span.stop))
            def _(index: int = index, number: Any = number) -> None:
                for name, source in (("pages", self.pages), ("scales", self.scales)):
                    if source is not None:
                        target = self.held[name].at[slot, index]
                        pltpu.make_async_copy(source.at[number], target, self.held["arrived"].at[slot]).start()

        return self.next(at, span), pointer

    def wait(self, at: Piece, span: Span, slot: Any) -> None:
        """Waits for a piece, and puts zeros where it holds a value that is not seen, which a weight of zero might not silence."""

        @pl.when(self.exists(at))
        def _() -> None:
            for name in ("pages",) if self.scales is None else ("pages", "scales"):
                arrived = self.held[name].at[slot, pl.ds(0, span.stop - span.begin)]
                pltpu.make_async_copy(arrived, arrived, self.held["arrived"].at[slot]).wait()

        start = (at.number * self.config.decode_pages) * self.problem.page_size
        first, stop = span.first_key - start, span.length - start
        is_whole = (first <= 0) & (stop >= self.config.decode_pages * self.problem.page_size)
        pl.when(self.exists(at) & ~is_whole)(lambda: self._silence(slot, span, first, stop))

    def _silence(self, slot: Any, span: Span, first: Any, stop: Any) -> None:
        p, held = self.problem, self.held["pages"]
        lanes = slice(p.lanes - p.query_lanes, p.lanes)

        def one(index: Any, _: None) -> None:
            row = index * p.page_size + jax.lax.broadcasted_iota(jnp.int32, (p.page_size, p.query_lanes), 0)
            for head in range(p.num_kv_heads):
                values = held[slot, index, head, :, lanes]
                kept = jnp.where((row >= first) & (row < stop), values.astype(F32), 0.0)
                held[slot, index, head, :, lanes] = kept.astype(values.dtype)

        jax.lax.fori_loop(0, span.begin + 1, one, None)
        jax.lax.fori_loop(jnp.maximum(span.stop - 1, span.begin + 1), self.config.decode_pages, one, None)

    def _scores(self, at: Piece, span: Span, keys: list[Any], slot: Any) -> list[Any]:
        """f32[rows, keys] of each KV head, and `MASKED` where nothing is seen."""
        p = self.problem
        row = jnp.minimum(at.row, p.num_decodes - 1)
        found = [product(self.held["queries"][row, head], one, (1, 1)) for head, one in enumerate(keys)]
        if p.stored is not None:
            found = [one * scales_of(self.held["scales"], slot, head, 0) for head, one in enumerate(found)]
        seen = self._seen(at, span)
        return [jnp.where(seen, bounded(p, one), MASKED) for one in found]

    def _seen(self, at: Piece, span: Span) -> Any:
        width = self.config.decode_pages * self.problem.page_size
        key = at.number * width + jax.lax.broadcasted_iota(jnp.int32, (self.problem.decode_rows, width), 1)
        return (key >= span.first_key) & (key < span.length)

    def empty(self, head: int) -> State:
        """Nothing has been seen, but for a sink, which is a first key whose value is zero."""
        rows, statistics = self.held["total"].shape[1:], self.held["highest"].shape[1:]
        total = jnp.zeros(rows, F32)
        if self.sinks is None:
            return State(total, jnp.zeros(statistics, F32), jnp.full(statistics, NOTHING_SEEN, F32))
        return State(total, jnp.ones(statistics, F32), self.sinks[head][:, : statistics[1]])

    def group(self, pieces: list[tuple[Piece, Span]], slots: list[Any]) -> None:
        """Works on pieces that have arrived, each step on all of them."""
        p, held = self.problem, self.held
        heads = range(p.num_kv_heads)
        names = State._fields
        both = [[keys_and_values(p, held["pages"], slot, head) for head in heads] for slot in slots]
        scores = [
            self._scores(at, span, [keys for keys, _ in one], slot)
            for (at, span), one, slot in zip(pieces, both, slots, strict=True)
        ]
        highest = [[jnp.max(one, axis=1, keepdims=True) for one in of_piece] for of_piece in scores]
        before = [State(*(held[name][head] for name in names)) for head in heads]
        tops: list[list[Any]] = []
        shrinks: list[list[Any]] = []
        last = [state.highest for state in before]
        empty = [self.empty(head) for head in heads]
        for (_, span), tallest in zip(pieces, highest, strict=True):
            begun = [jnp.where(span.is_first, empty[head].highest, last[head]) for head in heads]
            last = [jnp.maximum(begun[head], tallest[head]) for head in heads]
            tops.append(last)
            shrinks.append([jnp.exp2(begun[head] - last[head]) for head in heads])
        width = scores[0][0].shape[1]
        weights = [
            [jnp.exp2(one - spread(top, width)) for one, top in zip(of_piece, of_tops, strict=True)]
            for of_piece, of_tops in zip(scores, tops, strict=True)
        ]
        sums = [[jnp.sum(one, axis=1, keepdims=True) for one in of_piece] for of_piece in weights]
        if p.stored is not None:
            weights = [
                [
                    jnp.where(self._seen(at, span), one * scales_of(held["scales"], slot, head, 1), 0.0)
                    for head, one in enumerate(of_piece)
                ]
                for (at, span), of_piece, slot in zip(pieces, weights, slots, strict=True)
            ]
        found = [
            [product(one.astype(p.dtype), values, (1, 0)) for one, (_, values) in zip(of_piece, of_both, strict=True)]
            for of_piece, of_both in zip(weights, both, strict=True)
        ]
        state = before
        for index, (at, span) in enumerate(pieces):
            state = [
                self._taken(span, empty[head], state[head], tops[index][head], shrinks[index][head], sums[index][head], found[index][head])
                for head in heads
            ]  # fmt: skip
            row = jnp.where(self.exists(at), at.row, p.num_decodes)  # which nobody asks for
            for head in heads:
                normaliser = jnp.maximum(state[head].normaliser, 1e-30)
                result = state[head].total / spread(normaliser, p.query_lanes)
                held["out"][row, head] = result.astype(p.dtype)
        for head in heads:
            for name, value in zip(names, state[head], strict=True):
                held[name][head] = value

    def _taken(self, span: Span, empty: State, state: State, top: Any, shrink: Any, total: Any, found: Any) -> State:
        old = State(*(jnp.where(span.is_first, new, one) for new, one in zip(empty, state, strict=True)))
        lanes = self.problem.query_lanes
        return State(old.total * spread(shrink, lanes) + found, old.normaliser * shrink + total, top)

    def run(self) -> None:
        """All sequences of the phase."""
        pl.when(self.count > 0)(self._run)

    def _run(self) -> None:
        p, held = self.problem, self.held
        at_a_time, ring = self.config.decode_pieces, self.config.decode_ring * self.config.decode_pieces
        queries = pltpu.make_async_copy(
            self.queries.at[pl.ds(0, self.count)], held["queries"].at[pl.ds(0, self.count)], held["moved"].at[0]
        )
        queries.start()
        first = self.first_of(jnp.int32(0))
        for head in range(p.num_kv_heads):
            for name, value in zip(State._fields, self.empty(head), strict=True):
                held[name][head] = value

        def fetch(step: Any, ahead: tuple[Piece, Pointer]) -> tuple[Piece, Pointer]:
            return self.fetch(ahead, step)

        ahead = jax.lax.fori_loop(0, ring - at_a_time, fetch, (first, self.tables.start()))
        queries.wait()

        def body(carry: tuple[Any, Piece, tuple[Piece, Pointer]]) -> tuple[Any, Piece, tuple[Piece, Pointer]]:
            step, at, ahead = carry
            free = jax.lax.rem(step + ring - at_a_time, ring)
            pieces, slots = [], []
            for index in range(at_a_time):
                span = self.span(at)
                pieces.append((at, span))
                slots.append(step + index)
                at = self.next(at, span)
            for (one, span), slot in zip(pieces, slots, strict=True):
                self.wait(one, span, slot)
            self.group(pieces, slots)
            for index in range(at_a_time):
                ahead = self.fetch(ahead, free + index)
            return jax.lax.rem(step + at_a_time, ring), at, ahead

        jax.lax.while_loop(lambda carry: self.exists(carry[1]), body, (jnp.int32(0), first, ahead))
        done = pltpu.make_async_copy(
            held["out"].at[pl.ds(0, self.count)], self.out.at[pl.ds(0, self.count)], held["moved"].at[1]
        )
        done.start()
        done.wait()


def decode_scratch(problem: Problem, config: Config) -> dict[str, Any]:
    """Pallas scratch of the phase."""
    held = {
        name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in decode_buffers(problem, config).items()
    }
    pieces = pltpu.SemaphoreType.DMA((config.decode_ring * config.decode_pieces,))
    return held | {"arrived": pieces, "moved": pltpu.SemaphoreType.DMA((2,))}
