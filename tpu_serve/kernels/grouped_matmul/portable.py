"""The same products by `jax.lax.ragged_dot`, for every chip and shape; gradients are XLA's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.fused_moe_v2.tile import activate
from tpu_serve.kernels.grouped_matmul.visits import group_bounds, own_rows


def product(
    lhs: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | int,
    existing: jax.Array | None,
    activation: Activation | None,
    out_dtype: str,
) -> jax.Array:
    """As `op.grouped_matmul` and `op.grouped_gate_up`, without regard to where a tile ends; rows in no group are zero without `existing`.

    Args:
      weights: [E, Z, N_in, N_out], Z = 2 exactly if there is an activation.
    """
    num_experts, num_matrices = weights.shape[:2]
    starts, ends = group_bounds(group_sizes, group_offset, num_experts, len(lhs))
    own = own_rows(group_sizes, group_offset, num_experts, len(lhs))
    # Rows before the first group count as its own, because a ragged product begins at row 0. All foreign rows enter as zeros, so that NaN in
    # them reaches no gradient, and leave as zeros or as they were.
    sizes = (ends - starts).at[0].add(starts[0])
    rows = jnp.where(own, lhs, jnp.zeros((), lhs.dtype))
    # All matrices in one row, each with no rows where another of its group is meant: slicing the first ones of all groups out would copy them.
    matrices = weights.reshape(num_experts * num_matrices, *weights.shape[2:])
    products = [
        jax.lax.ragged_dot(
            rows,
            matrices,
            jnp.zeros((num_experts, num_matrices), jnp.int32).at[:, one].set(sizes).reshape(-1),
            precision=jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        for one in range(num_matrices)
    ]
    result = products[0] if activation is None else activate(products[0], products[1], activation)
    result = result.astype(jnp.dtype(out_dtype))
    return jnp.where(own, result, jnp.zeros((), result.dtype) if existing is None else existing)
