"""One block of keys and values in the running softmax of a tile of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpu_serve.kernels.ragged_paged_attention.config import Config
from tpu_serve.kernels.ragged_paged_attention.problem import SUBLANES, Problem
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
from tpu_serve.kernels.ragged_paged_attention.walk import Unit, Walk

LARGEST_FINITE = 3.4e38
UNROLLED_HEADS = 4
ZERO_ROWS = SUBLANES


class Seen(NamedTuple):
    """Which keys of a block the tokens of a tile see.

    Attributes:
      by_token: bool[tokens of the tile, keys].
      by_any: bool[keys, 1]: keys that lie among those that the sequence's tokens see.
    """

    by_token: Any
    by_any: Any


@dataclass(frozen=True)
class Softmax:
    """Refs in VMEM, see `config.prefill_buffers`.

    Attributes:
      zeros: [8, query lanes] of zeros in the type of the queries.
      sinks: f32[K, rows of a decode, 128], or None.
    """

    problem: Problem
    config: Config
    held: dict[str, Any]
    zeros: Any
    sinks: Any

    def _for_heads(self, body: Callable[[Any], None]) -> None:
        heads = self.problem.num_kv_heads
        if heads <= UNROLLED_HEADS:
            for head in range(heads):
                body(head)
        else:
            jax.lax.fori_loop(0, heads, lambda head, _: body(head), None)

    def begin(self) -> None:
        """Forgets the tile before: nothing has been seen, but for sinks, which are a first key whose value is zero."""
        held, tile = self.held, self.config.query_tile
        shape = held["highest"].shape[1:]

        def body(head: Any) -> None:
            held["total"][head] = jnp.zeros(held["total"].shape[1:], F32)
            if self.sinks is None:
                held["highest"][head] = jnp.full(shape, NOTHING_SEEN, F32)
                held["normaliser"][head] = jnp.zeros(shape, F32)
                return
            held["normaliser"][head] = jnp.ones(shape, F32)
            for one in range(self.problem.group):
                sink = self.sinks[head, one : one + 1, : shape[1]]
                held["highest"][head, one * tile : (one + 1) * tile] = jnp.broadcast_to(sink, (tile, shape[1]))

        self._for_heads(body)

    def sees_all(self, at: Unit, walk: Walk) -> Any:
        """Whether every row of the tile sees every key of the block."""
        key = at.piece * walk.width
        all_seen = (key + walk.width - 1 <= at.first + at.shift) & (at.end - at.first == self.config.query_tile)
        if walk.window is not None:
            all_seen &= key > at.end - 1 + at.shift - walk.window
        return all_seen

    def seen(self, at: Unit, walk: Walk) -> Seen:
        tokens = self.config.query_tile
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

    def _lanes(self, head: Any, one: int) -> Any:
        """Of a query head of a group in a tile of queries or results."""
        lanes = self.problem.query_lanes
        at = (head * self.problem.group + one) * lanes
        return pl.ds(at if isinstance(at, int) else pl.multiple_of(at, lanes), lanes)

    def _queries(self, slot: Any, head: Any) -> jax.Array:
        """[rows, query lanes], query head by query head."""
        queries = self.held["queries"]
        return jnp.concatenate(
            [queries[slot, :, self._lanes(head, one)] for one in range(self.problem.group)], axis=0
        )  # fmt: skip

    def _add_head(self, head: Any, slot: Any, queries_slot: Any, seen: Seen | None) -> None:
        p, held = self.problem, self.held
        width = self.config.prefill_pages * p.page_size
        keys, values = keys_and_values(p, held["pages"], slot, head)
        scores = product(self._queries(queries_slot, head), keys, (1, 1))
        value_scales = None
        if p.stored is not None:
            scores *= scales_of(held["scales"], slot, head, 0)
            value_scales = scales_of(held["scales"], slot, head, 1)
        scores = bounded(p, scores)
        if seen is not None:
            values, spoilt = self._without_nan(values, seen)
            if spoilt is not None:
                scores += spoilt
            scores = self._where(seen, scores, MASKED)
        highest = held["highest"][head]
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - spread(new_highest, width))
        shrink = jnp.exp2(highest - new_highest)
        total = jnp.sum(weights, axis=1, keepdims=True)
        held["normaliser"][head] = held["normaliser"][head] * shrink + total
        held["highest"][head] = new_highest
        if value_scales is not None:
            weights *= value_scales
            if seen is not None:  # a scale that is not finite belongs to a key that others may not see
                weights = self._where(seen, weights, 0.0)
        found = product(weights.astype(values.dtype), values, (1, 0))
        held["total"][head] = held["total"][head] * spread(shrink, p.query_lanes) + found

    def _where(self, seen: Seen, scores: jax.Array, otherwise: float) -> jax.Array:
        shaped = scores.reshape(self.problem.group, self.config.query_tile, -1)
        return jnp.where(seen.by_token[None], shaped, otherwise).reshape(scores.shape)

    def _without_nan(self, values: jax.Array, seen: Seen) -> tuple[jax.Array, jax.Array | None]:
        """Values that a weight of zero silences, and what to add to the scores: NaN for keys whose value is not finite, otherwise 0.

        Weight 0 does not silence a NaN. Of keys that only some of the rows see, the bad ones get to those rows through their score.
        """
        wide = values.astype(F32)
        good = seen.by_any & (jnp.abs(wide) <= LARGEST_FINITE)
        # Where key and value lie in one register the zeros of the query have met the value already.
        spoilt = None if self.problem.is_joint else product(self.zeros[...], values, (1, 1))[:1]
        return jnp.where(good, wide, 0.0).astype(values.dtype), spoilt

    def finish(self, slot: Any) -> None:
        """Puts the tile's results into a slot of `out`, zero in rows that have seen nothing."""
        held, tile, lanes = self.held, self.config.query_tile, self.problem.query_lanes

        def body(head: Any) -> None:
            result = held["total"][head] / spread(jnp.maximum(held["normaliser"][head], 1e-30), lanes)
            for one in range(self.problem.group):
                rows = result[one * tile : (one + 1) * tile]
                held["out"][slot, :, self._lanes(head, one)] = rows.astype(held["out"].dtype)

        self._for_heads(body)
