"""Products with experts whose weights are two arrays, as the split layout of checkpoints has them: two grouped products into one result.

Letters as in `op.py`; E experts of both halves together, H hidden. Half h of the split layout is `[E, H/2, N]`, which is the memory of the
matrices `[H, N]` of experts hE/2 to (h+1)E/2. Two halves in one array `[2, E, H/2, N]` are one array `[E, H, N]` by reshape, and need none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.grouped_matmul import portable
from tpu_serve.kernels.grouped_matmul.products import (
    Plan,
    log_fallback,
    plan_of,
    pull_products,
    refused,
    run_forward,
    run_input_gradient,
    run_weight_gradient,
)
from tpu_serve.kernels.grouped_matmul.visits import own_rows


def grouped_matmul_split(
    lhs: jax.Array,
    halves: Sequence[jax.Array],
    group_sizes: jax.Array,
    context: Context,
    *,
    group_offset: jax.Array | int = 0,
    out_dtype: str | None = None,
    backend: str = "tc",
) -> jax.Array:
    """`op.grouped_matmul` with the matrices of E groups in two arrays. Differentiable in lhs and both halves.

    The second product writes its own groups' rows into the first one's result. Gradients of rows are chained alike; each half's gradient is
    made in its own shape.

    Args:
      lhs: [R, H].
      halves: two arrays [E, H/2, N], E even.
      Others: as in `op.grouped_matmul`.

    Returns:
      [R, N], with rows in no group and gradients as in `op.grouped_matmul`.

    Raises:
      ValueError: shapes or types do not belong together.
    """
    low, high = halves
    if low.ndim != 3 or low.shape != high.shape or len(low) % 2:
        raise ValueError(f"halves must be two arrays [E, H/2, N] with an even E, got {low.shape} and {high.shape}")
    experts, hidden, columns = len(low) // 2, 2 * low.shape[1], low.shape[2]
    low, high = (half.reshape(experts, 1, hidden, columns) for half in (low, high))
    plan = plan_of(lhs, low, group_sizes, context, out_dtype or lhs.dtype.name, None, False, None, backend)
    if lhs.dtype != high.dtype or len(group_sizes) < 2 * experts:
        raise ValueError(
            f"both halves must be {lhs.dtype}, and group_sizes at least {2 * experts} numbers; "
            f"got {low.dtype}, {high.dtype} and {len(group_sizes)}"
        )
    offset = jnp.asarray(group_offset, jnp.int32)
    if backend == "tc":
        reason = refused(context, in_place(plan).problem, *plan.gradients())
        if reason is None:
            return _split(plan, lhs, low, high, group_sizes, offset)
        log_fallback(reason)
    out_type = plan.problem.out_type
    out = portable.product(lhs, low, group_sizes, offset, None, None, out_type)
    return portable.product(lhs, high, group_sizes, offset + experts, out, None, out_type)


def in_place(plan: Plan) -> Plan:
    """The same product into a given array."""
    return replace(plan, problem=replace(plan.problem, in_place=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split(
    plan: Plan, lhs: jax.Array, low: jax.Array, high: jax.Array, group_sizes: jax.Array, group_offset: jax.Array
) -> jax.Array:
    out = run_forward(plan, lhs, low, group_sizes, group_offset, None)
    return run_forward(in_place(plan), lhs, high, group_sizes, group_offset + len(low), out)


def _split_forward(plan: Plan, *arrays: Any) -> tuple[jax.Array, Any]:
    return _split(plan, *arrays), arrays


def _split_backward(plan: Plan, kept: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, low, high, group_sizes, group_offset = kept
    experts = len(low)
    own = own_rows(group_sizes, group_offset, 2 * experts, len(lhs))
    dproducts = pull_products(plan, lhs, low, group_sizes, group_offset, dout)
    dlhs = run_input_gradient(plan, low, group_sizes, group_offset, dproducts)
    dlhs = run_input_gradient(plan, high, group_sizes, group_offset + experts, dproducts, dlhs)
    dlow, dhigh = (
        run_weight_gradient(plan, lhs, group_sizes, group_offset + first, dproducts) for first in (0, experts)
    )
    return jnp.where(own, dlhs, jnp.zeros((), dlhs.dtype)), dlow, dhigh, None, None


_split.defvjp(_split_forward, _split_backward)


def keep_boundary(
    first: jax.Array, boundary: jax.Array, window: int, second: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """`second(first)`, with the rows that a product clears beside its own put back. The products of this package clear none.

    Some grouped products write whole tiles of rows and clear the rows of groups without a matrix in the tile where the first of their own
    begins. Chained, the second one clears the last rows of the first.

    Args:
      first: [R, N], result of the first product.
      boundary: i32 scalar, the second product's first row.
      window: rows that are saved, at least those of such a tile.
      second: the second product, which takes the memory of its argument.

    Returns:
      [R, N]: rows before the boundary as they are in `first`, the others as `second` gives them.
    """
    window = min(window, len(first))
    start = jnp.clip(boundary - window, 0, len(first) - window)
    saved = jax.lax.dynamic_slice_in_dim(first, start, window)
    # Saved before the second product may begin: read afterwards, the first result would have to be copied whole to be still there.
    first, saved = jax.lax.optimization_barrier((first, saved))
    out = second(first)
    written = jax.lax.dynamic_slice_in_dim(out, start, window)
    row = start + jnp.arange(window, dtype=jnp.int32)[:, None]
    return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(row < boundary, saved, written), start, axis=0)
