"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tpu_serve.config import ConfigError
from tpu_serve.device.batch import pytree
from tpu_serve.device.experts import ExpertWeights

__all__ = ["ExpertWeights", "MoEConfig", "Routing", "route"]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Shape and rules of a mixture-of-experts layer.

    Attributes:
      num_experts, top_k: experts in all, and per token.
      hidden, intermediate: sizes of a token and of an expert's inner layer.
      renormalise: divide the chosen weights by their sum.
      has_scales: the experts' weights are quantised.
      has_biases: the experts' projections add a bias.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    renormalise: bool
    has_scales: bool = False
    has_biases: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"config.json: num_experts_per_tok {self.top_k} of {self.num_experts} experts is impossible."
            )


@pytree
@dataclass(frozen=True, slots=True)
class Routing:
    """Weights f32[T, K] and expert ids i32[T, K]; id -1 means no expert and weight 0, as in padding rows."""

    weights: jax.Array
    expert_ids: jax.Array


def route(x: jax.Array, router: jax.Array, config: MoEConfig, is_token: jax.Array) -> Routing:
    """Softmax over all experts in float32, then the top k.

    Args:
      x: [T, H].
      router: [H, E].
      is_token: bool[T], False for padding rows, which go to no expert.
    """
    logits = jnp.dot(
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.top_k)
    if config.renormalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    keep = is_token[:, None]
    return Routing(jnp.where(keep, weights, 0.0), jnp.where(keep, ids, -1).astype(jnp.int32))
