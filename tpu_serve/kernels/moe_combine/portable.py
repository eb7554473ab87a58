"""The same three operations in plain JAX: with XLA's gathers, and as products with matrices of zeros and weights.

Letters as in `problem.py`. Rows of no choice may hold anything and are never looked at.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

F32 = jnp.float32


def row_of_choice(ids: jax.Array, num_experts: int) -> jax.Array:
    """i32[T, K]: the row of each choice in stable order of expert; choices without an expert come last."""
    keys = jnp.where(ids < 0, num_experts, ids).reshape(-1)
    order = jnp.argsort(keys, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    return rank.reshape(ids.shape).astype(jnp.int32)


def _coefficients(ids: jax.Array, weights: jax.Array | None) -> jax.Array:
    """f32[T, K], 0 where there is no expert."""
    ones = jnp.ones(ids.shape, F32) if weights is None else weights.astype(F32)
    return jnp.where(ids >= 0, ones, 0.0)


def gather_sums(
    rows: jax.Array, ids: jax.Array, weights: jax.Array | None, num_experts: int, out_dtype: str
) -> jax.Array:
    """[T, H]: see `gather.sums`."""
    picked = rows.at[row_of_choice(ids, num_experts)].get(mode="clip").astype(F32)
    coefficient = _coefficients(ids, weights)[..., None]
    return jnp.sum(jnp.where(coefficient != 0, picked * coefficient, 0.0), axis=1).astype(jnp.dtype(out_dtype))


def gather_dots(rows: jax.Array, ids: jax.Array, tokens: jax.Array, num_experts: int) -> jax.Array:
    """f32[T, K]: see `gather.dots`."""
    picked = rows.at[row_of_choice(ids, num_experts)].get(mode="clip").astype(F32)
    return jnp.where(ids >= 0, jnp.sum(picked * tokens[:, None].astype(F32), axis=-1), 0.0)


def gather_scattered(
    tokens: jax.Array, ids: jax.Array, weights: jax.Array | None, num_experts: int, num_rows: int
) -> jax.Array:
    """[R, H]: see `scatter.scattered`; rows of no choice are zero."""
    top_k = ids.shape[1]
    keys = jnp.where(ids < 0, num_experts, ids).reshape(-1)
    order = jnp.argsort(keys, stable=True)[:num_rows].astype(jnp.int32)
    order = jnp.pad(order, (0, num_rows - len(order)))
    some = jnp.arange(num_rows) < jnp.sum(ids >= 0)
    picked = tokens[order // top_k]
    if weights is not None:
        weight = weights.astype(F32).reshape(-1)[order][:, None]
        picked = jnp.where(weight != 0, picked.astype(F32) * weight, 0.0).astype(tokens.dtype)
    return jnp.where(some[:, None], picked, jnp.zeros((), tokens.dtype))


def _one_hot(ids: jax.Array, weights: jax.Array | None, num_experts: int, num_rows: int) -> jax.Array:
    """f32[T, R]: the weight with which a row is a token's."""
    row = jnp.where(ids >= 0, row_of_choice(ids, num_experts), -1)[..., None]
    here = row == jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.sum(jnp.where(here, _coefficients(ids, weights)[..., None], 0.0), axis=1)


def _product(matrix: jax.Array, values: jax.Array) -> jax.Array:
    """f32: matrix @ values, where 0 times what is not finite is 0. A sum with such a value is NaN, or that infinity where it is alone."""
    values = values.astype(F32)
    return jax.lax.cond(jnp.all(jnp.isfinite(values)), _times, _careful_product, matrix, values)


def _times(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)


def _careful_product(matrix: jax.Array, values: jax.Array) -> jax.Array:
    def any_of(left: jax.Array, right: jax.Array) -> jax.Array:
        return _times(left.astype(F32), right.astype(F32)) > 0

    up = any_of(matrix > 0, values == jnp.inf) | any_of(matrix < 0, values == -jnp.inf)
    down = any_of(matrix > 0, values == -jnp.inf) | any_of(matrix < 0, values == jnp.inf)
    nan = any_of(matrix != 0, jnp.isnan(values)) | (up & down)
    clean = _times(matrix, jnp.where(jnp.isfinite(values), values, 0.0))
    return jnp.where(nan, jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, clean)))


def one_hot_sums(
    rows: jax.Array, ids: jax.Array, weights: jax.Array | None, num_experts: int, out_dtype: str
) -> jax.Array:
    """[T, H]: see `gather.sums`."""
    return _product(_one_hot(ids, weights, num_experts, len(rows)), rows).astype(jnp.dtype(out_dtype))


def one_hot_dots(rows: jax.Array, ids: jax.Array, tokens: jax.Array, num_experts: int) -> jax.Array:
    """f32[T, K]: see `gather.dots`."""
    found = jnp.einsum("th,rh->tr", tokens.astype(F32), rows.astype(F32), precision=jax.lax.Precision.HIGHEST)
    here = row_of_choice(ids, num_experts)[..., None] == jnp.arange(len(rows), dtype=jnp.int32)
    return jnp.sum(jnp.where(here & (ids >= 0)[..., None], found[:, None], 0.0), axis=-1)


def one_hot_scattered(
    tokens: jax.Array, ids: jax.Array, weights: jax.Array | None, num_experts: int, num_rows: int
) -> jax.Array:
    """[R, H]: see `scatter.scattered`; rows of no choice are zero."""
    found = _product(_one_hot(ids, weights, num_experts, num_rows).T, tokens)
    return found.astype(tokens.dtype)
