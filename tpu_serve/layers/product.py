"""Products of tokens and weights, each in the form that its platform computes fastest. What is computed is the same on all.

XLA's CPU backend multiplies bfloat16 as it lies only where the result is wanted in float32 and there is more than one row. Anything else,
a gather too, it does by converting whole weights to float32, in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

LEAST_ROWS = 2


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight` of [..., K] and [K, N], added up in float32 and rounded to their type."""
    if not _is_bfloat16(x, weight):
        return jnp.dot(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=_rounded, default=jnp.dot)


def _rounded(x: jax.Array, weight: jax.Array) -> jax.Array:
    return float32_product(x, weight).astype(x.dtype)


def float32_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """f32[..., N] of x [..., K] and weight [K, N], for a CPU."""
    return _with_rows(x, lambda rows: jnp.dot(rows, weight, preferred_element_type=jnp.float32))


def table_product(x: jax.Array, table: jax.Array) -> jax.Array:
    """f32[..., V] of x [..., H] and table [V, H]."""

    def multiply(x: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.einsum("...h,vh->...v", x, table, preferred_element_type=jnp.float32)

    if not _is_bfloat16(x, table):
        return multiply(x, table)
    on_cpu = lambda x, table: _with_rows(x, lambda rows: multiply(rows, table))  # noqa: E731
    return jax.lax.platform_dependent(x, table, cpu=on_cpu, default=multiply)


def rows_of(table: jax.Array, index: jax.Array) -> jax.Array:
    """Rows [..., H] of the table [V, H] at i32[...]."""
    if not _is_bfloat16(table):
        return table[index]

    return jax.lax.platform_dependent(table, index, cpu=_bits_of_rows, default=lambda table, index: table[index])


@jax.custom_jvp
def _bits_of_rows(table: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(table, jnp.uint16)[index], table.dtype)


@_bits_of_rows.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Bits have no derivative, the rows do."""
    table, index = primals
    return _bits_of_rows(table, index), tangents[0][index]


def _is_bfloat16(*arrays: jax.Array) -> bool:
    return all(array.dtype == jnp.bfloat16 for array in arrays)


def _with_rows(x: jax.Array, multiply: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`multiply` of [..., K], which is called with no fewer than two rows."""
    rows = x.reshape(-1, x.shape[-1])
    filled = jnp.pad(rows, ((0, max(0, LEAST_ROWS - len(rows))), (0, 0)))
    done = multiply(filled)[: len(rows)]
    return done.reshape(*x.shape[:-1], done.shape[-1])
