"""The arithmetic of one tile, shared by every mode: rows times a slice of an expert's matrices.

Letters: M rows of the product, H padded hidden, F columns of the intermediate dimension in a tile, B blocks of rows that share a scale.
Nothing here knows when a buffer is filled or what becomes of a result: large ones are handed over panel by panel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS, Format
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Activation, PostNorm, ceil_div, round_up

F32 = jnp.float32


def quantise_rows(rows: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Rows f32[M, N] to 8 bits with a scale per row.

    A row whose maximum is not finite, or too small for a scale that is a normal number, becomes zeros with scale 0: the reciprocal of such
    a maximum would spoil all of it anyway.

    Returns:
      values dtype[M, N], scale f32[M, 1]; rows are about values * scale.
    """
    limit = ROW_LIMITS[dtype]
    magnitude = jnp.abs(rows)
    # NaN as an infinity: not every maximum hands a NaN on, and a row that keeps one spoils whatever it is summed with.
    peak = jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=1, keepdims=True)
    scale = peak / limit
    usable = (scale >= jnp.finfo(F32).tiny) & (peak < jnp.inf)
    scale = jnp.where(usable, scale, 0.0)
    values = jnp.where(usable, rows * jnp.where(usable, limit / peak, 0.0), 0.0)
    if dtype == "int8":
        return jnp.round(values).astype(jnp.int32).astype(jnp.int8), scale
    return values.astype(jnp.dtype(dtype)), scale


def to_activations(rows: jax.Array, weights: Format) -> tuple[jax.Array, jax.Array | None]:
    """Rows f32[M, N] in the type that enters the product.

    Returns:
      values [M, N]; scales f32[M, 1], or f32[M, B] when each block of columns has its own, or None when the type needs none.
    """
    if not weights.quantises_rows:
        return rows.astype(jnp.dtype(weights.activation)), None
    if not weights.group_scales:
        return quantise_rows(rows, weights.activation)
    parts = [quantise_rows(rows[:, columns], weights.activation) for columns in _blocks(rows.shape[1], weights.block)]
    return jnp.concatenate([part[0] for part in parts], axis=1), jnp.concatenate([part[1] for part in parts], axis=1)


def to_wire(rows: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array | None]:
    """Rows f32[M, N] in the type in which they travel, and f32[M, 1] scales where that is an 8-bit one."""
    if dtype in ROW_LIMITS:
        return quantise_rows(rows, dtype)
    return rows.astype(jnp.dtype(dtype)), None


def from_wire(
    rows: jax.Array, row_scale: jax.Array | None, wire: str, weights: Format
) -> tuple[jax.Array, jax.Array | None]:
    """Rows [M, N] that travelled in type `wire`, as `to_activations` gives them: as they came where that is the type of the product."""
    if wire == weights.activation and not weights.group_scales:
        return rows, row_scale
    rows = rows.astype(F32)
    return to_activations(rows if row_scale is None else rows * row_scale, weights)


def _blocks(contraction: int, block: int | None) -> list[slice]:
    size = block or contraction
    return [slice(start, min(start + size, contraction)) for start in range(0, contraction, size)]


def widened(values: jax.Array, scale: jax.Array | None, weights: Format) -> jax.Array:
    """Stored values [N, F] in the activations' type. Blocks too short for a product of their own are multiplied by their scales here.

    Args:
      scale: f32[B, F].
    """
    dtype = jnp.dtype(weights.activation)
    if weights.block is None or weights.block >= LANES:
        return values.astype(dtype)
    assert scale is not None
    rows = (
        values.astype(F32).reshape(-1, weights.block, values.shape[1]) * scale[: len(values) // weights.block, None, :]
    )
    return rows.reshape(values.shape).astype(dtype)


def product(
    rows: jax.Array, row_scale: jax.Array | None, values: jax.Array, scale: jax.Array | None, weights: Format
) -> jax.Array:
    """rows [M, N] @ values [N, F] with the scales of both, f32[M, F].

    Args:
      row_scale: what `to_activations` gave.
      scale: f32[B, F], or None when the values need none (any more).
    """
    if weights.block is not None and weights.block < LANES:
        scale = None  # already in the widened values
    blocks = _blocks(rows.shape[1], weights.block if scale is not None else None)
    total = None
    for index, block in enumerate(blocks):
        part = _dot(rows[:, block], values[block])
        if weights.group_scales and row_scale is not None:
            part = part * row_scale[:, index : index + 1]
        if scale is not None:
            part = part * scale[index : index + 1]
        total = part if total is None else total + part
    assert total is not None
    if row_scale is not None and not weights.group_scales:
        total = total * row_scale
    return total


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    if left.dtype == jnp.int8:
        return jnp.dot(left, right, preferred_element_type=jnp.int32).astype(F32)
    # Full float32 products: the matrix unit's default rounds float32 to bfloat16 first.
    precision = jax.lax.Precision.HIGHEST if left.dtype == F32 else None
    return jnp.dot(left, right, preferred_element_type=F32, precision=precision)


def activate(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """f32[M, F] of the two halves; formulas at `Activation`."""
    if activation.name == "silu":
        return gate * jax.nn.sigmoid(gate) * up
    if activation.name == "gelu":
        return 0.5 * gate * (1 + jax.lax.erf(gate * F32(0.5**0.5))) * up
    if activation.name == "gelu_tanh":
        inner = F32((2 / jnp.pi) ** 0.5) * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1 + jnp.tanh(inner)) * up
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate * jax.nn.sigmoid(activation.alpha * gate)


FEW_ROWS = 32


def widest_panel(num_rows: int) -> int:
    """Columns of one product at most. Wider ones take several times longer to compile; narrower ones wait for the matrix unit's first results."""
    return 3072 if num_rows <= FEW_ROWS else 1024


def panel_columns(columns: int, num_rows: int) -> int:
    """Width of the panels into which so many columns are cut, all but the last, which may be narrower."""
    panels = ceil_div(columns, widest_panel(num_rows))
    return round_up(ceil_div(columns, panels), LANES)


def for_panels(columns: int, num_rows: int, body: Any) -> None:
    """body(pl.ds of one panel), in a loop: unrolled, the products of a large tile make long programs."""
    width = panel_columns(columns, num_rows)
    whole = columns // width

    def one(index: Any, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * width, width), width))

    if whole == 1:
        body(pl.ds(0, width))
    else:
        jax.lax.fori_loop(0, whole, one, None)
    if columns % width:
        body(pl.ds(whole * width, columns % width))


def inner(
    rows: Any,
    row_scale: jax.Array | None,
    tile: ExpertWeights,
    weights: Format,
    activation: Activation,
    factor: jax.Array | None,
    store: Any,
) -> None:
    """First products and activation, panel by panel.

    Args:
      rows: reference [M, H] in the activations' type; row_scale: its scales.
      tile: references of one tile: gate_up [2, H, F], scales [2, B1, F], biases [2, 1, F].
      factor: f32[M, 1] that multiplies the expert's input, or None.
      store: called as store(columns, f32[M, columns]) for each panel of the F columns.
    """

    def half(index: int, columns: Any) -> jax.Array:
        scale = None if tile.gate_up_scale is None else tile.gate_up_scale[index, :, columns]
        one = product(rows[...], row_scale, tile.gate_up[index, :, columns], scale, weights)
        if factor is not None:
            one = one * factor
        if tile.gate_up_bias is not None:
            one = one + tile.gate_up_bias[index, :, columns]
        return one

    def panel(columns: Any) -> None:
        store(columns, activate(half(0, columns), half(1, columns), activation))

    for_panels(tile.gate_up.shape[2], rows.shape[0], panel)


def outer(hidden: jax.Array, row_scale: jax.Array | None, tile: ExpertWeights, weights: Format, add: Any) -> None:
    """Second product of one tile, without its bias, panel by panel.

    Args:
      hidden: [M, F] in the activations' type; row_scale: its scales.
      tile: references of one tile: down [F, H], scale [B2, 1, H].
      add: called as add(columns, f32[M, columns]) for each panel of the H columns.
    """

    def panel(columns: Any) -> None:
        scale = None if tile.down_scale is None else tile.down_scale[:, 0, columns]
        add(columns, product(hidden, row_scale, tile.down[:, columns], scale, weights))

    for_panels(tile.down.shape[1], hidden.shape[0], panel)


def normalise(rows: jax.Array, norm: PostNorm, weight: jax.Array, hidden: int) -> jax.Array:
    """RMSNorm of rows f32[M, H] over their first `hidden` columns; the padding columns are zero. weight f32[1, H]."""
    mean = jnp.sum(rows * rows, axis=1, keepdims=True) / hidden
    return rows * jax.lax.rsqrt(mean + norm.epsilon) * (weight + 1.0 if norm.plus_one else weight)


def flatten(lanes: jax.Array, hidden: int) -> jax.Array:
    """Travelling rows [M, L, 128] as [M, H], without the padding."""
    return lanes.reshape(lanes.shape[0], -1)[:, :hidden]


def to_lanes(rows: jax.Array, row_lanes: int) -> jax.Array:
    """Rows [M, H] as they travel, [M, L, 128], padded with zeros."""
    missing = row_lanes * LANES - rows.shape[1]
    if missing:
        rows = jnp.concatenate([rows, jnp.zeros((rows.shape[0], missing), rows.dtype)], axis=1)
    return rows.reshape(rows.shape[0], row_lanes, LANES)
