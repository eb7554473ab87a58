"""The expert that every token passes through, beside those that a router chooses (Qwen2-MoE, Qwen3-Next, Qwen3.5-MoE)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.layers.transformer import gated_mlp, gated_mlp_specs, linear_spec


def shared_expert_specs(prefix: str, hidden: int, inner: int, dtype: Any) -> dict[str, Any]:
    """`shared_expert`, a gated MLP, and `shared_expert_gate` [H, 1], for a layer whose experts lie under `prefix`."""
    return {
        "shared_expert": gated_mlp_specs(f"{prefix}.shared_expert", hidden, inner, dtype),
        "shared_expert_gate": linear_spec(f"{prefix}.shared_expert_gate", hidden, 1, dtype, (None, None)),
    }


def shared_expert(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """`sigmoid(gate(x)) * mlp(x)`, [T, H] -> [T, H], of a layer that holds the two."""
    return jax.nn.sigmoid(jnp.dot(x, layer["shared_expert_gate"])) * gated_mlp(layer["shared_expert"], x)
