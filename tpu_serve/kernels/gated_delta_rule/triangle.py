"""Inverses of triangular matrices [C, C] that lie side by side, [C, n * C]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_serve.kernels.gated_delta_rule.problem import LANES
from tpu_serve.kernels.gated_delta_rule.products import product
from tpu_serve.kernels.gated_delta_rule.steps import Steps

F32 = jnp.float32
BLOCK = 8
"""Rows that are solved one after the other: those of a register. Larger blocks are joined by products."""


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def on_diagonal(matrices: jax.Array, count: int) -> jax.Array:
    """[n * R, n * w] with n matrices [R, w], given side by side, along the diagonal."""
    width = matrices.shape[1] // count
    if count == 1:
        return matrices
    if width % LANES:
        of = iota(matrices.shape, 1) >> (width.bit_length() - 1)
        return jnp.concatenate([jnp.where(of == index, matrices, 0.0) for index in range(count)], axis=0)
    zeros = jnp.zeros((len(matrices), width), matrices.dtype)
    rows = [
        [matrices[:, index * width : (index + 1) * width] if index == other else zeros for other in range(count)]
        for index in range(count)
    ]
    return jnp.concatenate([jnp.concatenate(row, axis=1) for row in rows], axis=0)


def inverse(lower: jax.Array, exact: bool) -> Steps[jax.Array]:
    """The inverses of I + lower, for strictly lower triangular matrices f32[C, n * C] with C a power of two from 8 on.

    Blocks of a register's height by substitution, row after row; neighbours are then joined, [[A, 0], [B, D]] being [[a, 0], [-d B a, d]].
    The product (I - L)(I + L^2)(I + L^4)… is no alternative: where keys repeat, powers of L grow like binomials before they vanish.
    """
    size, count = len(lower), lower.shape[1] // len(lower)
    row, column = iota(lower.shape, 0), iota(lower.shape, 1) & (size - 1)
    solved = _blocks(jnp.where(row >> 3 == column >> 3, lower, 0.0), jnp.where(row == column, 1.0, 0.0), exact)
    level = 3
    yield
    while (block := 1 << level) < size:
        below = jnp.where(row >> level == (column >> level) + 1, lower, 0.0)
        starts = range(block, size, 2 * block)
        right = product(_rows(below, starts, block), on_diagonal(solved, count), exact)
        yield
        zeros = jnp.zeros((block, lower.shape[1]), F32)
        spread = [
            piece for index in range(len(starts)) for piece in (zeros, right[index * block : (index + 1) * block])
        ]
        odd = _rows(solved, starts, block)
        odd = odd - product(odd, on_diagonal(jnp.concatenate(spread, axis=0), count), exact)
        joined = [
            piece
            for index, start in enumerate(starts)
            for piece in (solved[start - block : start], odd[index * block : (index + 1) * block])
        ]
        solved, level = jnp.concatenate(joined, axis=0), level + 1
        yield
    return solved


def _blocks(within: jax.Array, identity: jax.Array, exact: bool) -> jax.Array:
    """Substitution in the blocks on the diagonals, all at once.

    A step takes from each row its factor times the block's row of that step. The matrix unit spreads factors over the lanes of their matrix.
    """
    size, width = within.shape
    place, lane = iota((width, width), 0), iota((width, width), 1)
    level = size.bit_length() - 1
    same = place >> level == lane >> level
    steps = [jnp.where(same & ((place & (BLOCK - 1)) == step), 1.0, 0.0) for step in range(BLOCK - 1)]
    pick = jnp.concatenate(steps, axis=1)
    factors = product(within, pick if exact else pick.astype(jnp.bfloat16), exact)
    solved = identity
    for step in range(BLOCK - 1):
        blocks = solved.reshape(-1, BLOCK, width)
        picked = jnp.broadcast_to(blocks[:, step : step + 1], blocks.shape).reshape(size, width)
        solved = solved - factors[:, step * width : (step + 1) * width] * picked
    return solved


def _rows(matrix: jax.Array, starts: range, block: int) -> jax.Array:
    return jnp.concatenate([matrix[start : start + block] for start in starts], axis=0)
