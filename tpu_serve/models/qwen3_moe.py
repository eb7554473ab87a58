"""Qwen3-MoE: attention with per-head q/k norm, then a mixture of experts or, in some layers, a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.layer_kinds import read_moe_layers, require_silu
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.norm import rms_norm
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.transformer import (
    attention,
    attention_specs,
    decoder_specs,
    expert_specs,
    gated_mlp,
    gated_mlp_specs,
    linear_spec,
    mixture,
    norm_spec,
    project_logits,
    run_decoder,
)
from tpu_serve.models.base import Experts


@dataclass(frozen=True, slots=True)
class Qwen3Moe:
    """Sizes of a model; see `Model` for the functions.

    Attributes:
      moe_layers: per layer, whether it holds experts.
      dense_intermediate: inner size of the layers that do not.
    """

    vocab_size: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig
    moe_layers: tuple[bool, ...]
    dense_intermediate: int
    rope: Rope
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> Qwen3Moe:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        if config.get("attention_bias", False):
            raise ConfigError("config.json: attention_bias is not supported for qwen3_moe.")
        if config.get("use_sliding_window", False):
            raise ConfigError("config.json: use_sliding_window is not supported for qwen3_moe.")
        require_silu(config)
        hidden, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
        head_dim = config.positive("head_dim", hidden // num_heads)
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=config.positive("num_key_value_heads", num_heads),
            head_dim=head_dim,
            moe=MoEConfig(
                num_experts=config.positive("num_experts"),
                top_k=config.positive("num_experts_per_tok"),
                hidden=hidden,
                intermediate=config.positive("moe_intermediate_size"),
                renormalise=config.get("norm_topk_prob", False),
            ),
            moe_layers=read_moe_layers(config),
            dense_intermediate=config.get("intermediate_size", 0),
            rope=Rope.from_config(config, head_dim, default_theta=1e4),
            epsilon=config.get("rms_norm_eps", 1e-6),
            max_position=config.positive("max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.tied else ()

    def cache_layout(self, dtype: Any) -> CacheLayout:
        return CacheLayout.uniform(len(self.moe_layers), self.num_kv_heads, self.head_dim, dtype)

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""
        layers = [
            self._layer_specs(f"model.layers.{i}", has_experts, dtype) for i, has_experts in enumerate(self.moe_layers)
        ]
        return decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)

    def _layer_specs(self, prefix: str, has_experts: bool, dtype: Any) -> dict[str, Any]:
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        experts = {
            "router": linear_spec(f"{mlp}.gate", self.hidden, self.moe.num_experts, dtype, (None, None)),
            "experts": expert_specs(f"{mlp}.experts", self.moe, dtype),
        }
        return {
            "input_norm": norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            "attention": attention_specs(attn, self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype),
            "q_norm": norm_spec(f"{attn}.q_norm", self.head_dim, dtype),
            "k_norm": norm_spec(f"{attn}.k_norm", self.head_dim, dtype),
            "post_attention_norm": norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
            **(experts if has_experts else {"mlp": gated_mlp_specs(mlp, self.hidden, self.dense_intermediate, dtype)}),
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
        norm = partial(rms_norm, epsilon=self.epsilon)
        attend = partial(mixing.attend, scale=self.head_dim**-0.5)

        def mixer(_: None, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            def prepare(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                return rotate(norm(q, layer["q_norm"]), cos_sin), rotate(norm(k, layer["k_norm"]), cos_sin)

            return attention(layer["attention"], x, cache, self.head_dim, attend, prepare)

        def feed_forward(layer: Any, x: jax.Array) -> jax.Array:
            return gated_mlp(layer["mlp"], x) if "mlp" in layer else mixture(layer, x, self.moe, is_token, experts)

        kinds = [None] * len(self.moe_layers)
        return run_decoder(params, token_ids, caches, kinds, mixer, feed_forward, norm)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return project_logits(hidden, params["embedding"] if self.tied else params["lm_head"])
