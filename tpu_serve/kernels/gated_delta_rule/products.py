"""Products on the matrix unit, of which bfloat16 is the native type."""

from __future__ import annotations

import jax
import jax.numpy as jnp

F32, BF16 = jnp.float32, jnp.bfloat16


def product(left: jax.Array, right: jax.Array, exact: bool, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """f32: left @ right, summed over these dimensions. Unless `exact`, with 16 bits of each float32 factor, which two parts of bfloat16 hold."""
    if exact:
        return _multiply(left, right, contract, jax.lax.Precision.HIGHEST)
    lefts, rights = _parts(left, 2), _parts(right, 2)
    total = None
    for i, j in ((1, 0), (0, 1), (0, 0)):  # the small ones first; what two low parts make is below the 16 bits
        if i < len(lefts) and j < len(rights):
            one = _multiply(lefts[i], rights[j], contract)
            total = one if total is None else total + one
    assert total is not None
    return total


def sums(chosen: jax.Array, values: jax.Array) -> jax.Array:
    """f32[n, m]: for each row of bool[n, k] the sum of the rows f32[k, m] that it chooses, as exact as additions in float32."""
    which = chosen.astype(F32).astype(BF16)
    low, middle, high = (_multiply(which, part, (1, 0)) for part in reversed(_parts(values, 3)))
    return low + middle + high


def _multiply(
    left: jax.Array,
    right: jax.Array,
    contract: tuple[int, int],
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=F32)


def _parts(values: jax.Array, count: int) -> list[jax.Array]:
    """Arrays of bfloat16 whose sum is `values`, to 8 bits for each of them; a single one where that is their type."""
    if values.dtype == BF16:
        return [values]
    parts = []
    for _ in range(count):
        parts.append(values.astype(BF16))
        values = values - parts[-1].astype(F32)
    return parts
