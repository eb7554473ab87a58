"""Mode D with `Config.compact_rows`: an expert's own rows are picked out, multiplied, and their results put back among the tokens.

Picking and putting back are products with matrices of zeros and ones, which move whole rows at the rate of the matrix unit and are exact:
each sum has one term that is not zero. Zero times a value that is not finite would reach other tokens, so such values are set aside first.

Letters: R tokens of the group rounded up as in `mode_d.py`, M compact rows (`Config.compact_rows`), H padded hidden, E local experts,
B blocks of columns that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import tile
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem

F32 = jnp.float32

LARGEST = 3.3e38
"""Magnitudes from here on count as infinite: a little more would be rounded up to an infinity in bfloat16."""


@dataclass(frozen=True)
class CompactRows:
    """The products of mode D on the rows that an expert has.

    Args:
      scratch: references to the buffers of `buffers.mode_d`.
      counts: i32[E] in SMEM, rows of each local expert.
    """

    problem: Problem
    config: Config
    scratch: dict[str, Any]
    counts: Any

    def prepare(self) -> None:
        """Before the first expert, once `activations` and `coefficients` are there: ranks, and tokens that are not finite set aside."""
        s = self.scratch
        routed = (s["coefficients"][...] != 0).astype(F32)
        num_rows = routed.shape[1]
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (num_rows, num_rows), axis) for axis in (0, 1))
        before = (row < lane).astype(F32)
        s["ranks"][...] = jnp.where(routed != 0, _dot(routed, before), -1.0)
        upto = _dot_transposed((lane <= row).astype(F32), routed)
        earlier = _dot_transposed((lane < row).astype(F32), routed)
        s["rank_columns"][...] = jnp.where(upto > earlier, earlier, -1.0)
        if self.problem.weights.quantises_rows:  # such rows are zeros already
            s["spoilt"][...] = jnp.zeros_like(s["spoilt"])
            return
        activations = s["activations"][...].astype(F32)
        finite = jnp.min(jnp.where(jnp.abs(activations) < jnp.inf, 1.0, 0.0), axis=1, keepdims=True)
        is_routed = jnp.max(s["rank_columns"][...], axis=1, keepdims=True) >= 0
        s["activations"][...] = where_finite(activations, finite > 0).astype(s["activations"].dtype)
        spoilt = (finite == 0) & is_routed
        s["spoilt"][...] = spoilt.astype(F32)

    def accumulate(self, part: ExpertWeights, expert: Any, index: Any) -> None:
        """Adds to `sum` what one tile of an expert contributes, or keeps it in `expert_sum` until the expert's last tile."""
        size = self.config.compact_rows

        def one(number: Any, _: None) -> None:
            rows = pl.ds(pl.multiple_of(number * size, size), size)
            _when(index == 0, self._one_tile, lambda: self._pick(rows, number, expert))
            self._multiply(rows, part, index)
            last = self.config.tiles_per_expert(self.problem) - 1
            _when(index == last, self._one_tile, lambda: self._put_back(rows, number, expert))

        jax.lax.fori_loop(0, pl.cdiv(self.counts[expert], size), one, None)

    @property
    def _one_tile(self) -> bool:
        return self.config.tiles_per_expert(self.problem) == 1

    def _pick(self, rows: Any, number: Any, expert: Any) -> None:
        """Rows number * M and following of the expert from `activations` to `picked`, zeros where it has no more."""
        s, size = self.scratch, self.config.compact_rows
        ranks = s["ranks"][pl.ds(expert, 1)]
        wanted = jax.lax.broadcasted_iota(jnp.int32, (size, ranks.shape[1]), 0) + number * size
        chosen = ranks == wanted.astype(F32)
        dtype = s["activations"].dtype

        def panel(columns: Any) -> None:
            s["picked"][rows, columns] = _select(chosen, s["activations"][:, columns]).astype(dtype)

        tile.for_panels(self.problem.padded_hidden, size, panel)
        if "picked_scale" in s:
            s["picked_scale"][rows] = _select(chosen, s["activation_scale"][...])
        weights = jnp.where(chosen, s["coefficients"][pl.ds(expert, 1)], 0.0)
        s["picked_coefficient"][rows] = jnp.sum(weights, axis=1, keepdims=True)

    def _multiply(self, rows: Any, part: ExpertWeights, index: Any) -> None:
        p, s = self.problem, self.scratch

        def store(columns: Any, hidden: jax.Array) -> None:
            s["hidden"][:, columns] = hidden.astype(s["hidden"].dtype)

        def add(columns: Any, done: jax.Array) -> None:
            if part.down_bias is not None:
                done = done + jnp.where(index == 0, part.down_bias[:, columns], 0.0)
            if not self._one_tile:
                done = jnp.where(index == 0, done, s["expert_sum"][rows, columns] + done)
            s["expert_sum"][rows, columns] = done

        row_scale = s["picked_scale"][rows] if "picked_scale" in s else None
        factor = s["picked_coefficient"][rows] if p.scale_on_input else None
        tile.inner(s["picked"].at[rows], row_scale, part, p.weights, p.activation, factor, store)
        values, scale = tile.to_activations(s["hidden"][...].astype(F32), p.weights)
        tile.outer(values, scale, part, p.weights, add)

    def _put_back(self, rows: Any, number: Any, expert: Any) -> None:
        """`expert_sum` of the rows, weighted, added to their tokens' `sum`; a token whose row is not finite is noted in `spoilt`."""
        p, s, size = self.problem, self.scratch, self.config.compact_rows
        if p.post_norm is not None:
            norm = tile.normalise(s["expert_sum"][rows], p.post_norm, s["norm_weight"][...], p.hidden)
            s["expert_sum"][rows] = norm
        coefficient = None if p.scale_on_input else s["picked_coefficient"][rows]
        places = self._places(number, expert)

        def panel(columns: Any) -> None:
            done = s["expert_sum"][rows, columns]
            done = done if coefficient is None else coefficient * done
            finite = jnp.abs(done) < LARGEST
            parts = _bfloat16_parts(where_finite(done, finite))
            s["sum"][:, columns] += _dot(places, parts)
            spoilt = jnp.max(jnp.where(finite, 0.0, 1.0), axis=1, keepdims=True)
            spoilt = jnp.broadcast_to(spoilt, (size, LANES)).astype(jnp.bfloat16)
            s["spoilt"][...] += _dot(places[:, :size], spoilt)[:, :1]

        tile.for_panels(p.padded_hidden, size, panel)

    def finish(self) -> None:
        """After the last expert: NaN in `sum` for tokens that were set aside."""
        s = self.scratch
        is_spoilt = s["spoilt"][...] > 0

        def panel(columns: Any) -> None:
            s["sum"][:, columns] = jnp.where(is_spoilt, jnp.nan, s["sum"][:, columns])

        tile.for_panels(self.problem.padded_hidden, len(is_spoilt), panel)

    def _places(self, number: Any, expert: Any) -> jax.Array:
        """bfloat16[R, 3M], 1 where a lane (modulo M) is the token's place among these rows."""
        size = self.config.compact_rows
        ranks = self.scratch["rank_columns"][...]
        lane = jax.lax.broadcasted_iota(jnp.int32, ranks.shape, 1)
        rank = jnp.sum(jnp.where(lane == expert, ranks, 0.0), axis=1, keepdims=True)
        place = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (ranks.shape[0], 3 * size), 1), size)
        return (rank == (place + number * size).astype(F32)).astype(F32).astype(jnp.bfloat16)


def _when(condition: Any, always: bool, body: Any) -> None:
    """body() under a condition, or without one where it always holds: a branch would end a stretch of code that is scheduled as one."""
    if always:
        body()
    else:
        pl.when(condition)(body)


def where_finite(values: jax.Array, finite: jax.Array) -> jax.Array:
    """Zeros for the others, so that a product with zeros and ones may have them."""
    return jnp.where(finite, values, 0.0)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=F32)


def _dot_transposed(left: jax.Array, right: jax.Array) -> jax.Array:
    """left [M, K] @ right [N, K] transposed."""
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=F32)


def _select(chosen: jax.Array, values: jax.Array) -> jax.Array:
    """Rows of values [R, N] that bool[M, R] chooses, at most one each, as f32 or i32 [M, N]. Exact for all finite values."""
    ones = chosen.astype(F32)
    if values.dtype == F32:
        return jnp.dot(ones, values, preferred_element_type=F32, precision=jax.lax.Precision.HIGHEST)
    if values.dtype == jnp.int8:
        ones = ones.astype(jnp.int32).astype(jnp.int8)
        return jnp.dot(ones, values, preferred_element_type=jnp.int32)
    return _dot(ones.astype(values.dtype), values)


def _bfloat16_parts(values: jax.Array) -> jax.Array:
    """f32[M, N] as bfloat16[3M, N], three parts that add up to it exactly."""
    parts = []
    for _ in range(3):
        part = values.astype(jnp.bfloat16)
        values = values - part.astype(F32)
        parts.append(part)
    return jnp.concatenate(parts)
