"""An expert at a time, in a loop: what backends for a CPU are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_serve.layers.moe.expert import Expert
from tpu_serve.layers.moe.routing import ExpertWeights
from tpu_serve.layers.product import float32_product

_BITS = {"bfloat16": jnp.uint16, "float8_e4m3fn": jnp.uint8, "float4_e2m1fn": jnp.uint4}


def run_expert(rows: jax.Array, weights: ExpertWeights, expert: jax.Array, trip: jax.Array, rule: Expert) -> jax.Array:
    """What an expert makes of rows [R, H], f32[R, H].

    Args:
      weights: of all experts.
      trip: something that changes with every trip of the loop.
    """
    dtype = rows.dtype
    one = rule.widened(_one_expert(weights, expert, trip), dtype)
    bias = one.gate_up_bias
    gate, up = (float32_product(rows, matrix).astype(dtype) for matrix in (one.gate_up[0], one.gate_up[1]))
    inner = rule.inner(gate, up, None if bias is None else (bias[0], bias[1])).astype(dtype)
    done = float32_product(inner, one.down)
    return done if one.down_bias is None else done + one.down_bias


def _one_expert(weights: ExpertWeights, expert: jax.Array, trip: jax.Array) -> ExpertWeights:
    """An expert's weights inside of a loop, as they are stored, without the axis E.

    XLA's CPU backend slices bfloat16 by converting the whole array to float32, and moves that out of the loop: every call would convert all
    experts. Bits are sliced as they lie; the barrier keeps them where the loop is.
    """

    def slice_of(array: jax.Array) -> jax.Array:
        bits = _BITS.get(array.dtype.name)
        stored = array if bits is None else jax.lax.bitcast_convert_type(array, bits)
        one = jax.lax.dynamic_index_in_dim(stored, expert, keepdims=False)
        return jax.lax.bitcast_convert_type(one, array.dtype)

    held, _ = jax.lax.optimization_barrier((weights, trip))
    return jax.tree.map(slice_of, held)
