"""Inside the kernels: where each choice of a block lies in the buffer, and the matrices of zeros and weights that move rows.

Letters as in `problem.py`; experts lie along sublanes and tokens along lanes, where comparing with a row costs nothing to spread it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.kernels.moe_combine.problem import CHUNK, LANES, SUBLANES, Problem

F32 = jnp.float32
NOWHERE = -1.0


def places(ids: jax.Array, base: jax.Array) -> jax.Array:
    """f32[K, C]: the row of the buffer at which each choice lies, `NOWHERE` where it names no expert.

    An expert's rows are in order of token, then of choice, so a choice lies behind `base` by the number of choices of its expert before it.

    Args:
      ids: i32[K, C].
      base: f32[E, 1].
    """
    top_k, tokens = ids.shape
    experts = jax.lax.broadcasted_iota(jnp.int32, (len(base), tokens), 0)
    chosen = jnp.zeros(experts.shape, F32)
    for choice in range(top_k):
        chosen += jnp.where(ids[choice : choice + 1] == experts, 1.0, 0.0)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (tokens, tokens), axis) for axis in (0, 1))
    before = jnp.where(row < column, 1.0, 0.0).astype(jnp.bfloat16)
    # Counts of at most K are exact in bfloat16, their sums in float32.
    next_row = base + jnp.dot(chosen.astype(jnp.bfloat16), before, preferred_element_type=F32)
    found = []
    for choice in range(top_k):
        hit = ids[choice : choice + 1] == experts
        place = jnp.sum(jnp.where(hit, next_row, 0.0), axis=0, keepdims=True)
        found.append(jnp.where(ids[choice : choice + 1] >= 0, place, NOWHERE))
        next_row = next_row + jnp.where(hit, 1.0, 0.0)
    return jnp.concatenate(found)


STRIP = 32
"""Tokens, or rows, of which a matrix is built at a time: few enough to stay in registers from the first choice to the last."""


def rows_by_token(spread: Any, weighted: bool, first: Any) -> jax.Array:
    """f32[STRIP, C]: the weight with which a row of the buffer, from `first` on, belongs to a token; 0 where it does not.

    Args:
      spread: reference to f32[1 or 2, K, 8, C], the same in every sublane: places, and weights unless they are ones.
      weighted: False for ones whatever the weights.
    """
    total = jnp.zeros((STRIP, spread.shape[3]), F32)
    row = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0).astype(F32) + first.astype(F32)
    for choice in range(spread.shape[1]):
        place = jnp.concatenate([spread[0, choice]] * (STRIP // SUBLANES))
        weight = jnp.concatenate([spread[1, choice]] * (STRIP // SUBLANES)) if weighted else 1.0
        # A row is one choice's: what is there already stays.
        total = jnp.where(place == row, weight, total)
    return total


def token_by_rows(spread: Any, first: Any) -> jax.Array:
    """f32[STRIP, CHUNK]: the weight with which a row of the buffer, from `first` on, belongs to one of a strip of tokens.

    Args:
      spread: reference to f32[1 or 2, K, STRIP, 128], the same in every lane: places, and weights unless they are ones.
    """
    total = jnp.zeros((STRIP, CHUNK), F32)
    row = jax.lax.broadcasted_iota(jnp.int32, total.shape, 1).astype(F32) + first.astype(F32)
    for choice in range(spread.shape[1]):
        place = across(spread[0, choice], CHUNK)
        weight = 1.0 if spread.shape[0] == 1 else across(spread[1, choice], CHUNK)
        total = jnp.where(place == row, weight, total)
    return total


def parts(problem: Problem, values: jax.Array) -> list[jax.Array]:
    """A matrix of weights as matrices that the matrix unit takes and whose sum it is."""
    dtype = jnp.dtype(problem.product_dtype)
    first = values.astype(dtype)
    if problem.num_parts == 1:
        return [first]
    rest = values - first.astype(F32)
    return [first, jnp.where(is_finite(rest), rest, 0.0).astype(dtype)]


def multiply(left: jax.Array, right: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two matrices over the named axes, in float32. Float32 factors are not rounded first, as the matrix unit would."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == F32 else None
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=F32)


def is_finite(values: jax.Array) -> jax.Array:
    """bool, elementwise, of float32 values."""
    return values - values == 0.0


def across(column: jax.Array, columns: int) -> jax.Array:
    """[M, 128], the same in every lane, as [M, columns]."""
    return jnp.concatenate([column] * (columns // LANES), axis=1)
