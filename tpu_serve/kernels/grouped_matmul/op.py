"""Grouped products as differentiable functions: rows sorted by group, each times the matrix of its group.

Letters: R rows, E groups that have matrices here, E_all all groups, N_in and N_out sizes of a matrix, H hidden, I intermediate.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.grouped_matmul import portable
from tpu_serve.kernels.grouped_matmul.config import Config
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


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    context: Context,
    *,
    group_offset: jax.Array | int = 0,
    existing: jax.Array | None = None,
    out_dtype: str | None = None,
    config: Config | None = None,
    backend: str = "tc",
) -> jax.Array:
    """Each row times the matrix of its group, summed in float32. Differentiable in lhs, rhs and existing.

    Args:
      lhs: [R, N_in], bfloat16 or float32, sorted by group. Rows in no group may hold anything, NaN included.
      rhs: [E, N_in, N_out] of the same type, the matrices of groups `group_offset` to `group_offset` + E.
      group_sizes: i32[E_all], rows of each group from row 0 on; together at most R.
      context: chip, and compiled or simulated.
      group_offset: a number or an i32 scalar, with E_all at least `group_offset` + E.
      existing: [R, N_out] of the out type, whose memory the result takes: rows of the E groups are replaced, no other is touched. Nothing is
        copied if it has no other use.
      out_dtype: of the result; that of `existing`, or of lhs, by default.
      config: tiles of the forward kernel, or None for sensible ones.
      backend: "tc" is the kernel, where it cannot be had "xla", which the log says; "xla" is `jax.lax.ragged_dot`.

    Returns:
      [R, N_out]. Rows in none of the E groups are those of `existing`; without it they are unspecified, and may be NaN.
      Gradients of rows in none of the groups are zero.

    Raises:
      ValueError: shapes or types do not belong together, or the config is not legal.
    """
    out_type = out_dtype or (lhs if existing is None else existing).dtype.name
    if rhs.ndim != 3:
        raise ValueError(f"rhs must be [E, N_in, N_out], got {rhs.shape}")
    if existing is not None and (existing.shape != (len(lhs), rhs.shape[2]) or existing.dtype != jnp.dtype(out_type)):
        raise ValueError(
            f"existing must be {out_type}{[len(lhs), rhs.shape[2]]}, got {existing.dtype}{list(existing.shape)}"
        )
    plan = plan_of(lhs, rhs[:, None], group_sizes, context, out_type, None, existing is not None, config, backend)
    return _choose(plan, backend, lhs, rhs[:, None], group_sizes, group_offset, existing)


def grouped_gate_up(
    lhs: jax.Array,
    gate_up: jax.Array,
    group_sizes: jax.Array,
    activation: Activation,
    context: Context,
    *,
    group_offset: jax.Array | int = 0,
    out_dtype: str | None = None,
    config: Config | None = None,
    backend: str = "tc",
) -> jax.Array:
    """activation(row @ gate, row @ up) with the matrices of each row's group, in one pass. Differentiable in lhs and gate_up.

    Args:
      lhs: [R, H].
      gate_up: [E, 2, H, I], gate first.
      Others: as in `grouped_matmul`.

    Returns:
      [R, I]; rows in no group and gradients as in `grouped_matmul`. The backward pass makes the two products again.

    Raises:
      ValueError: as in `grouped_matmul`.
    """
    if gate_up.ndim != 4 or gate_up.shape[1] != 2:
        raise ValueError(f"gate_up must be [E, 2, H, I], got {gate_up.shape}")
    out_type = out_dtype or lhs.dtype.name
    plan = plan_of(lhs, gate_up, group_sizes, context, out_type, activation, False, config, backend)
    return _choose(plan, backend, lhs, gate_up, group_sizes, group_offset, None)


def _choose(
    plan: Plan,
    backend: str,
    lhs: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | int,
    existing: jax.Array | None,
) -> jax.Array:
    offset = jnp.asarray(group_offset, jnp.int32)
    if backend == "tc" and (reason := refused(plan.context, plan.problem)) is not None:
        log_fallback(reason)
        backend = "xla"
    if backend == "xla":
        return _portable(plan, lhs, weights, group_sizes, offset, existing)
    return _product(plan, lhs, weights, group_sizes, offset, existing)


def _portable(
    plan: Plan,
    lhs: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing: jax.Array | None,
) -> jax.Array:
    p = plan.problem
    return portable.product(lhs, weights, group_sizes, group_offset, existing, p.activation, p.out_type)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    plan: Plan,
    lhs: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing: jax.Array | None,
) -> jax.Array:
    return run_forward(plan, lhs, weights, group_sizes, group_offset, existing)


def _product_forward(plan: Plan, *arrays: Any) -> tuple[jax.Array, Any]:
    # What was in `existing` is not kept: it may be gone.
    return run_forward(plan, *arrays), arrays[:4]


def _product_backward(plan: Plan, kept: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, weights, group_sizes, group_offset = kept
    p = plan.problem
    own = own_rows(group_sizes, group_offset, p.experts, p.rows)
    zero = jnp.zeros((), dout.dtype)
    dexisting = jnp.where(own, zero, dout) if p.in_place else None
    if (reason := refused(plan.context, *plan.gradients())) is not None:
        log_fallback(reason)
        _, pull = jax.vjp(
            lambda lhs, weights: _portable(plan, lhs, weights, group_sizes, group_offset, None), lhs, weights
        )
        return (*pull(dout), None, None, dexisting)
    dproducts = pull_products(plan, lhs, weights, group_sizes, group_offset, dout)
    dlhs = run_input_gradient(plan, weights, group_sizes, group_offset, dproducts)
    dweights = run_weight_gradient(plan, lhs, group_sizes, group_offset, dproducts)
    return jnp.where(own, dlhs, jnp.zeros((), dlhs.dtype)), dweights, None, None, dexisting


_product.defvjp(_product_forward, _product_backward)
