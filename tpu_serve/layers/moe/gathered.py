"""Each expert that any token chose, on all tokens: for a CPU and few tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from tpu_serve.device.chip import Chip
from tpu_serve.layers.moe.expert import Expert
from tpu_serve.layers.moe.one_device import OneDevice
from tpu_serve.layers.moe.one_expert import run_expert
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Gathered(OneDevice):
    """A loop over the experts in use. Their weights are read once, and a product of a few rows takes about as long as one of a single row, so no
    token is moved; what an expert makes of tokens that did not choose it is dropped."""

    expert: Expert = field(default_factory=Expert)
    name: str = "gathered"

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        return "on a TPU every token would wait for each expert in turn" if chip.is_tpu else None

    def weighted_sum(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        num_experts = len(weights.gate_up)
        chosen = routing.expert_ids[..., None] == jnp.arange(num_experts)  # [T, K, E]; id -1 matches none
        share = jnp.sum(jnp.where(chosen, routing.weights[..., None], 0.0), axis=1).T
        goes, in_use = chosen.any(axis=1).T, chosen.any(axis=(0, 1))
        first = jnp.argsort(~in_use, stable=True)

        def body(trip: jax.Array, total: jax.Array) -> jax.Array:
            expert = first[trip]
            done = run_expert(x, weights, expert, trip, self.expert) * share[expert][:, None]
            return total + jnp.where(
                goes[expert][:, None], done, 0.0
            )  # nothing comes of an expert whose result is not finite

        return jax.lax.fori_loop(0, in_use.sum(), body, jnp.zeros(x.shape, jnp.float32))
