"""One block of keys and values in the running softmax of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpu_serve.kernels.ragged_paged_attention.config import Phase
from tpu_serve.kernels.ragged_paged_attention.problem import SUBLANES, Problem
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk

F32 = jnp.float32
MASKED = -1e30
"""Score of a key that is not seen; far from any real one and finite, so that differences are."""
LARGEST_FINITE = 3.4e38
UNROLLED_HEADS = 4


class Seen(NamedTuple):
    """Which keys of a block the tokens of a tile see.

    Attributes:
      by_token: bool[tokens of the tile, keys], or [1, keys] where there is one token.
      by_any: bool[keys, 1]: keys that lie among those that the sequence's tokens see.
    """

    by_token: Any
    by_any: Any


def _spread(column: jax.Array, width: int) -> jax.Array:
    """[R, L] with equal lanes as [R, width]."""
    lanes = column.shape[1]
    if width <= lanes:
        return column[:, :width]
    return jnp.concatenate(
        [column] * (width // lanes) + ([column[:, : width % lanes]] if width % lanes else []), axis=1
    )


@dataclass(frozen=True)
class Softmax:
    """Refs in VMEM, see `config.phase_buffers`.

    Attributes:
      zeros: [8, query lanes] of zeros in the type of the queries.
      sinks: f32[K, rows of a decode, 128], or None.
    """

    problem: Problem
    phase: Phase
    held: dict[str, Any]
    zeros: Any
    sinks: Any

    def _for_heads(self, body: Any) -> None:
        heads = self.problem.num_kv_heads
        if heads <= UNROLLED_HEADS:
            for head in range(heads):
                body(head)
        else:
            jax.lax.fori_loop(0, heads, lambda head, _: body(head), None)

    def begin(self) -> None:
        """Forgets the tile before: nothing has been seen, but for sinks, which are a first key whose value is zero."""
        held = self.held
        outer, inner = self.phase.rows

        def body(head: Any) -> None:
            held["total"][head] = jnp.zeros(held["total"].shape[1:], F32)
            shape = held["highest"].shape[1:]
            if self.sinks is None:
                held["highest"][head] = jnp.full(shape, MASKED, F32)
                held["normaliser"][head] = jnp.zeros(shape, F32)
                return
            held["normaliser"][head] = jnp.ones(shape, F32)
            if self.phase.is_decode:
                held["highest"][head] = self.sinks[head][:, : shape[1]]
                return
            for one in range(outer):
                sink = self.sinks[head, one : one + 1, : shape[1]]
                held["highest"][head, one * inner : (one + 1) * inner] = jnp.broadcast_to(sink, (inner, shape[1]))

        self._for_heads(body)

    def sees_all(self, at: Unit, walk: Walk) -> Any:
        """Whether every row of the tile sees every key of the block."""
        key = at.piece * walk.width
        first = at.first + at.shift
        all_seen = key + walk.width - 1 <= first
        if walk.window is not None:
            all_seen &= key > at.end - 1 + at.shift - walk.window
        if self.phase.is_decode:
            return all_seen
        return all_seen & (at.end - at.first == self.phase.tile)

    def seen(self, at: Unit, walk: Walk) -> Seen:
        tokens = self.phase.tile
        key = at.piece * walk.width + jax.lax.broadcasted_iota(jnp.int32, (tokens, walk.width), 1)
        token = at.tile * tokens + jax.lax.broadcasted_iota(jnp.int32, (tokens, walk.width), 0)
        position = token + at.shift
        by_token = (key <= position) & (token >= at.first) & (token < at.end)
        if walk.window is not None:
            by_token &= key > position - walk.window
        row = at.piece * walk.width + jax.lax.broadcasted_iota(jnp.int32, (walk.width, 1), 0)
        return Seen(by_token, (row >= walk.first_key(at)) & (row < at.end + at.shift))

    def add(self, slot: Any, queries_slot: Any, seen: Seen | None) -> None:
        """Takes a block in.

        Args:
          slot, queries_slot: of the rings.
          seen: None where all rows see all keys.
        """
        self._for_heads(lambda head: self._add_head(head, slot, queries_slot, seen))

    def _add_head(self, head: Any, slot: Any, queries_slot: Any, seen: Seen | None) -> None:
        p, held = self.problem, self.held
        rows, width = held["total"].shape[1], self.phase.pages * p.page_size
        queries = held["queries"][queries_slot, head].reshape(rows, p.query_lanes)
        keys, values = self._keys_and_values(slot, head)
        scores = _product(queries, keys, (1, 1))
        value_scales = None
        if p.stored is not None:
            scores *= self._scales(slot, head, 0)
            value_scales = self._scales(slot, head, 1)
        if p.soft_cap is not None:
            scores = p.soft_cap * jnp.tanh(scores / p.soft_cap)
        if seen is not None:
            values, spoilt = self._without_nan(values, seen)
            if spoilt is not None:
                scores += spoilt
            scores = self._where(seen, scores, MASKED)
        highest = held["highest"][head]
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - _spread(new_highest, width))
        if seen is not None:
            weights = self._where(seen, weights, 0.0)
        shrink = jnp.exp(highest - new_highest)
        total = jnp.sum(weights, axis=1, keepdims=True)
        held["normaliser"][head] = held["normaliser"][head] * shrink + total
        held["highest"][head] = new_highest
        if value_scales is not None:
            weights *= value_scales
            if seen is not None:  # a scale that is not finite belongs to a key that others may not see
                weights = self._where(seen, weights, 0.0)
        found = _product(weights.astype(values.dtype), values, (1, 0))
        held["total"][head] = held["total"][head] * _spread(shrink, p.query_lanes) + found

    def _keys_and_values(self, slot: Any, head: Any) -> tuple[jax.Array, jax.Array]:
        """[keys, query lanes] each, in the type of the queries; one array twice where they lie in one register."""
        p = self.problem
        pages, dtype = self.held["pages"], jnp.dtype(p.dtype)

        def read(lanes: slice) -> jax.Array:
            found = pages[slot, :, head, :, lanes]
            found = found.reshape(-1, found.shape[-1])
            if found.dtype == dtype:
                return found
            return found.astype(F32).astype(dtype)

        if p.is_joint:
            both = read(slice(0, p.lanes))
            return both, both
        return read(slice(0, p.head_dim)), read(slice(p.head_dim, p.lanes))

    def _scales(self, slot: Any, head: Any, which: int) -> jax.Array:
        """f32[1, keys] of keys (0) or values (1)."""
        scales = self.held["scales"]
        return jnp.concatenate(
            [scales[slot, page, head, which : which + 1] for page in range(self.phase.pages)], axis=1
        )

    def _where(self, seen: Seen, scores: jax.Array, otherwise: float) -> jax.Array:
        shaped = scores.reshape(*self.phase.rows, -1)
        return jnp.where(seen.by_token[None], shaped, otherwise).reshape(scores.shape)

    def _without_nan(self, values: jax.Array, seen: Seen) -> tuple[jax.Array, jax.Array | None]:
        """Values that a weight of zero silences, and what to add to the scores: NaN for keys whose value is not finite, otherwise 0.

        Weight 0 does not silence a NaN. Of keys that only some of the rows see, the bad ones get to those rows through their score.
        """
        wide = values.astype(F32)
        if self.phase.is_decode:
            return jnp.where(seen.by_any, wide, 0.0).astype(values.dtype), None
        good = seen.by_any & (jnp.abs(wide) <= LARGEST_FINITE)
        # Where key and value lie in one register the zeros of the query have met the value already.
        spoilt = None if self.problem.is_joint else _product(self.zeros[...], values, (1, 1))[:1]
        return jnp.where(good, wide, 0.0).astype(values.dtype), spoilt

    def result(self, head: Any) -> jax.Array:
        """[rows, query lanes] of the tile, zero in rows that have seen nothing."""
        held, lanes = self.held, self.problem.query_lanes
        normaliser = jnp.maximum(held["normaliser"][head], 1e-30)
        return held["total"][head] / _spread(normaliser, lanes)

    def finish(self, slot: Any) -> None:
        """Puts the tile's results into a slot of `out`."""
        out = self.held["out"]

        def body(head: Any) -> None:
            out[slot, head] = self.result(head).reshape(out.shape[2:]).astype(out.dtype)

        self._for_heads(body)


def _product(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if left.dtype == F32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=F32)


ZERO_ROWS = SUBLANES
