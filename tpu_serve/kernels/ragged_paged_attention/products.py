"""What both phases of attention do with a block of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.kernels.ragged_paged_attention.problem import LOG2_E, Problem

F32 = jnp.float32
MASKED = -1e30
"""Score of a key that is not seen; far from any real one and finite, so that differences are."""
NOTHING_SEEN = -1e29
"""Highest score before any key is seen: above `MASKED`, so that keys that are not seen have no weight."""


def product(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """f32 product of two matrices over these dimensions of them."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == F32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=F32)


def spread(column: jax.Array, width: int) -> jax.Array:
    """[R, L] with equal lanes as [R, width]."""
    lanes = column.shape[1]
    if width <= lanes:
        return column[:, :width]
    return jnp.concatenate(
        [column] * (width // lanes) + ([column[:, : width % lanes]] if width % lanes else []), axis=1
    )


def keys_and_values(problem: Problem, pages: Any, slot: Any, head: Any) -> tuple[jax.Array, jax.Array]:
    """[keys, query lanes] each, in the type of the queries; one array twice where they lie in one register."""
    p, dtype = problem, jnp.dtype(problem.dtype)

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


def scales_of(scales: Any, slot: Any, head: Any, which: int) -> jax.Array:
    """f32[1, keys] of keys (0) or values (1)."""
    pages = scales.shape[1]
    return jnp.concatenate([scales[slot, page, head, which : which + 1] for page in range(pages)], axis=1)


def bounded(problem: Problem, scores: jax.Array) -> jax.Array:
    """Scores to the base 2; without a soft cap the queries have that factor already."""
    if problem.soft_cap is None:
        return scores
    return (problem.soft_cap * LOG2_E) * jnp.tanh(scores / problem.soft_cap)
