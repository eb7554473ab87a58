"""Who is routed where in mode D, as its kernel wants to know it. Runs in XLA, before the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_serve.kernels.fused_moe_v2.buffers import coefficients_shape
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem


def coefficients(
    problem: Problem, config: Config, expert_ids: jax.Array, routing_weights: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Routing weights by local expert, of an expert that a token names twice their sum.

    Args:
      expert_ids: i32[G, K] of all tokens, over all experts, -1 for none; routing_weights: f32[G, K].
      first: number of the first local expert.

    Returns:
      f32 of `buffers.coefficients_shape`, 0 where a token is not routed to an expert; i32[E] tokens of each local expert.
    """
    by_expert = config.compact_rows > 0
    shape = coefficients_shape(problem, config)
    local = expert_ids - first
    local = jnp.where((expert_ids >= 0) & (local < problem.local_experts), local, -1)
    if by_expert:  # tokens in the lanes of a register, which few experts would not fill
        chosen = jnp.arange(shape[0])[:, None, None] == local.T
        weights = jnp.sum(jnp.where(chosen, routing_weights.T, 0.0), axis=1)
    else:
        chosen = local[:, :, None] == jnp.arange(shape[1])
        weights = jnp.sum(jnp.where(chosen, routing_weights[:, :, None], 0.0), axis=1)
    weights = jnp.pad(weights, [(0, wanted - had) for wanted, had in zip(shape, weights.shape, strict=True)])
    counts = jnp.sum(weights != 0, axis=1 if by_expert else 0, dtype=jnp.int32)
    return weights, counts[: problem.local_experts]


def active_first(counts: jax.Array) -> jax.Array:
    """i32[E]: experts that have tokens, in order, and zeros after them. Compared in pairs, which XLA does faster than it sorts."""
    experts = jnp.arange(len(counts), dtype=jnp.int32)
    is_active = counts > 0
    place = jnp.sum((experts[:, None] < experts) & is_active[:, None], axis=0, dtype=jnp.int32)
    here = (place == experts[:, None]) & is_active
    return jnp.sum(jnp.where(here, experts, 0), axis=1, dtype=jnp.int32)
