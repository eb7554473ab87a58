"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from tpu_serve.config import ConfigError
from tpu_serve.device.batch import pytree
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.problem import Activation

__all__ = ["ExpertWeights", "MoEConfig", "Routing", "route"]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Shape and rules of a mixture-of-experts layer.

    Attributes:
      num_experts, top_k: experts in all, and per token.
      hidden, intermediate: sizes of a token and of an expert's inner layer.
      renormalise: divide the chosen weights by their sum.
      format: name in `fused_moe_v2.formats.FORMATS` of the experts' weights; None where they have the model's type.
      has_biases: the experts' projections add a bias.
      activation: between an expert's projections.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    renormalise: bool
    format: str | None = None
    has_biases: bool = False
    activation: Activation = field(default_factory=Activation)

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


def route(
    x: jax.Array,
    router: jax.Array,
    config: MoEConfig,
    is_token: jax.Array,
    bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
) -> Routing:
    """Softmax over all experts in float32, then the top k.

    Renormalised, that is the softmax over the k chosen logits, as GPT-OSS and Mixtral have it.

    Args:
      x: [T, H].
      router: [H, E].
      is_token: bool[T], False for padding rows, which go to no expert.
      bias: [E], added to the logits.
      expert_scale: [E], factor on an expert's weight at the very end.
    """
    logits = jnp.dot(
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        logits += bias.astype(jnp.float32)
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.top_k)
    if config.renormalise:
        weights /= weights.sum(axis=-1, keepdims=True)
    if expert_scale is not None:
        weights *= expert_scale.astype(jnp.float32)[ids]
    keep = is_token[:, None]
    return Routing(jnp.where(keep, weights, 0.0), jnp.where(keep, ids, -1).astype(jnp.int32))
