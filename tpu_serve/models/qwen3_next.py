"""Qwen3-Next: gated DeltaNet in most layers, gated attention in the others; then experts and one that all tokens share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax

from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.gated_attention import gated_attention, gated_attention_specs
from tpu_serve.layers.gated_delta_net import GatedDeltaNet
from tpu_serve.layers.layer_kinds import FULL, LINEAR, read_kinds, read_moe_layers, require_silu
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.norm import rms_norm_wide
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.shared_expert import shared_expert, shared_expert_specs
from tpu_serve.layers.transformer import (
    decoder_specs,
    expert_specs,
    gated_mlp,
    gated_mlp_specs,
    linear_spec,
    mixture,
    offset_norm_spec,
    project_logits,
    run_decoder,
)
from tpu_serve.models.base import Experts


@dataclass(frozen=True, slots=True)
class Qwen3Next:
    """Sizes of a model; see `Model` for the functions.

    Attributes:
      kinds: per layer, LINEAR or FULL.
      delta_net: of the LINEAR layers.
      moe_layers: per layer, whether it holds experts.
      dense_intermediate: inner size of the layers that do not.
      shared_intermediate: inner size of the expert that all tokens share.
    """

    vocab_size: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kinds: tuple[str, ...]
    delta_net: GatedDeltaNet
    moe: MoEConfig
    moe_layers: tuple[bool, ...]
    dense_intermediate: int
    shared_intermediate: int
    rope: Rope
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> Self:
        """Reads sizes from config.json. What transformers has a size of its own for may be absent.

        Raises:
          ConfigError: something is missing or not supported.
        """
        return cls._read(config, read_moe_layers(config), renormalise=config.get("norm_topk_prob", True))

    @classmethod
    def _read(cls, config: HFConfig, moe_layers: tuple[bool, ...], renormalise: bool) -> Self:
        family = config.get("model_type", kind=str)
        require_silu(config)
        for unsupported in ("attention_bias", "use_sliding_window"):
            if config.get(unsupported, False):
                raise ConfigError(f"config.json: {unsupported} is not supported for {family}.")
        if not config.get("attn_output_gate", True):
            raise ConfigError(f"config.json: attn_output_gate must be true for {family}.")
        hidden, epsilon = config.positive("hidden_size"), config.get("rms_norm_eps", 1e-6)
        head_dim = config.positive("head_dim", 256)
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden=hidden,
            num_heads=config.positive("num_attention_heads"),
            num_kv_heads=config.positive("num_key_value_heads", 2),
            head_dim=head_dim,
            kinds=_read_kinds(config),
            delta_net=GatedDeltaNet.from_config(config, epsilon),
            moe=MoEConfig(
                num_experts=config.positive("num_experts"),
                top_k=config.positive("num_experts_per_tok"),
                hidden=hidden,
                intermediate=config.positive("moe_intermediate_size"),
                renormalise=renormalise,
            ),
            moe_layers=moe_layers,
            dense_intermediate=0 if all(moe_layers) else config.positive("intermediate_size"),
            shared_intermediate=config.positive("shared_expert_intermediate_size", 512),
            rope=_read_rope(config, head_dim),
            epsilon=epsilon,
            max_position=config.positive("max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        # The layer behind mtp predicts a second token, which nothing here asks for.
        return ("mtp.*", *(("lm_head.weight",) if self.tied else ()))

    def cache_layout(self, dtype: Any) -> CacheLayout:
        paged = PagedCache(self.num_kv_heads, self.head_dim)
        return CacheLayout(tuple(self.delta_net.cache if kind == LINEAR else paged for kind in self.kinds), dtype)

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""
        layers = [self._layer_specs(layer, f"model.layers.{layer}", dtype) for layer in range(len(self.kinds))]
        specs = decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)
        return specs | {"norm": offset_norm_spec("model.norm", self.hidden, dtype)}

    def _layer_specs(self, layer: int, prefix: str, dtype: Any) -> dict[str, Any]:
        if self.kinds[layer] == LINEAR:
            mixer = {"delta_net": self.delta_net.param_specs(f"{prefix}.linear_attn", self.hidden, dtype)}
        else:
            mixer = {
                "attention": gated_attention_specs(
                    f"{prefix}.self_attn", self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype
                )
            }
        return {
            "input_norm": offset_norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            **mixer,
            "post_attention_norm": offset_norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
            **self._feed_forward_specs(layer, f"{prefix}.mlp", dtype),
        }

    def _feed_forward_specs(self, layer: int, prefix: str, dtype: Any) -> dict[str, Any]:
        if not self.moe_layers[layer]:
            return {"mlp": gated_mlp_specs(prefix, self.hidden, self.dense_intermediate, dtype)}
        return {
            "router": linear_spec(f"{prefix}.gate", self.hidden, self.moe.num_experts, dtype, (None, None)),
            "experts": expert_specs(f"{prefix}.experts", self.moe, dtype),
            **shared_expert_specs(prefix, self.hidden, self.shared_intermediate, dtype),
        }

    def forward(
        self,
        params: Any,
        token_ids: jax.Array,
        positions: jax.Array,
        is_token: jax.Array,
        caches: list[Any],
        mixing: Mixing,
        experts: Experts,
    ) -> tuple[jax.Array, list[Any]]:
        """Hidden states after the final norm, [T, H], and the new caches."""
        cos_sin = self.rope.cos_sin(positions)
        norm = partial(rms_norm_wide, epsilon=self.epsilon, offset=1.0)
        attend = partial(mixing.attend, scale=self.head_dim**-0.5)

        def mixer(kind: str, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            if kind == LINEAR:
                return self.delta_net.mix(layer["delta_net"], x, cache, mixing)
            weights = layer["attention"]

            def prepare(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                return rotate(norm(q, weights["q_norm"]), cos_sin), rotate(norm(k, weights["k_norm"]), cos_sin)

            return gated_attention(weights, x, cache, self.head_dim, attend, prepare)

        def feed_forward(layer: Any, x: jax.Array) -> jax.Array:
            if "mlp" in layer:
                return gated_mlp(layer["mlp"], x)
            return mixture(layer, x, self.moe, is_token, experts) + shared_expert(layer, x)

        return run_decoder(params, token_ids, caches, self.kinds, mixer, feed_forward, norm)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return project_logits(hidden, params["embedding"] if self.tied else params["lm_head"])


def _read_kinds(config: HFConfig) -> tuple[str, ...]:
    """Per layer its kind: `layer_types` says it, or every `full_attention_interval`-th layer is FULL."""
    interval = config.positive("full_attention_interval", 4)
    kinds = read_kinds(config, (LINEAR, FULL), lambda layer: LINEAR if (layer + 1) % interval else FULL)
    if FULL not in kinds:
        raise ConfigError(f"config.json: layer_types must have at least one {FULL!r}.")
    return kinds


def _read_rope(config: HFConfig, head_dim: int) -> Rope:
    """Over a quarter of each head unless config.json says otherwise. Positions of a text are the same in all of mRoPE's sections."""
    scaling = config.get("rope_scaling", None, kind=dict) or {}
    own = {
        "rope_theta": config.get("rope_theta", 1e4),
        "partial_rotary_factor": config.get("partial_rotary_factor", 0.25),
    }
    return Rope.from_parameters({**scaling, **own}, head_dim, default_theta=1e4)
