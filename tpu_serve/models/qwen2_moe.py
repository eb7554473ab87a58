"""Qwen2-MoE: attention with biases, then a mixture of experts beside a shared expert or, in some layers, a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.layer_kinds import read_moe_layers, read_windows, require_silu
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.norm import rms_norm
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.shared_expert import shared_expert, shared_expert_specs
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
class Qwen2Moe:
    """Sizes of a model; see `Model` for the functions.

    Attributes:
      biases: letters of the attention projections that have one, of "qkvo".
      moe_layers: per layer, whether it holds experts.
      shared_intermediate: inner size of the shared expert beside them.
      dense_intermediate: inner size of the layers without experts, 0 where there are none.
      windows: per layer, how many keys a token sees, its own included; None for all before it.
    """

    vocab_size: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    biases: str
    moe: MoEConfig
    moe_layers: tuple[bool, ...]
    shared_intermediate: int
    dense_intermediate: int
    windows: tuple[int | None, ...]
    rope: Rope
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> Qwen2Moe:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        require_silu(config)
        hidden, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
        head_dim = config.positive("head_dim", hidden // num_heads)
        moe_layers = read_moe_layers(config)
        # Where no layer_types say which, every second layer of the first max_window_layers slides.
        num_sliding = config.get("max_window_layers", 28) if config.get("use_sliding_window", False) else 0
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=config.positive("num_key_value_heads", num_heads),
            head_dim=head_dim,
            biases="qkv" if config.get("qkv_bias", True) else "",
            moe=MoEConfig(
                num_experts=config.positive("num_experts"),
                top_k=config.positive("num_experts_per_tok"),
                hidden=hidden,
                intermediate=config.positive("moe_intermediate_size"),
                renormalise=config.get("norm_topk_prob", False),
            ),
            moe_layers=moe_layers,
            shared_intermediate=config.positive("shared_expert_intermediate_size"),
            dense_intermediate=0 if all(moe_layers) else config.positive("intermediate_size"),
            windows=read_windows(config, lambda layer: layer < num_sliding and layer % 2 == 0),
            rope=Rope.from_config(config, head_dim, default_theta=1e4),
            epsilon=config.get("rms_norm_eps", 1e-6),
            max_position=config.positive("max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.tied else ()

    def cache_layout(self, dtype: Any) -> CacheLayout:
        layers = tuple(PagedCache(self.num_kv_heads, self.head_dim, window) for window in self.windows)
        return CacheLayout(layers, dtype)

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""
        layers = [
            self._layer_specs(f"model.layers.{i}", has_experts, dtype) for i, has_experts in enumerate(self.moe_layers)
        ]
        return decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)

    def _layer_specs(self, prefix: str, has_experts: bool, dtype: Any) -> dict[str, Any]:
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        specs = {
            "input_norm": norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            "attention": attention_specs(
                attn, self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.biases
            ),
            "post_attention_norm": norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
        }
        if not has_experts:
            return specs | {"mlp": gated_mlp_specs(mlp, self.hidden, self.dense_intermediate, dtype)}
        return {
            **specs,
            "router": linear_spec(f"{mlp}.gate", self.hidden, self.moe.num_experts, dtype, (None, None)),
            "experts": expert_specs(f"{mlp}.experts", self.moe, dtype),
            **shared_expert_specs(mlp, self.hidden, self.shared_intermediate, dtype),
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

        def mixer(window: int | None, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            def prepare(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                return rotate(q, cos_sin), rotate(k, cos_sin)

            attend = partial(mixing.attend, scale=self.head_dim**-0.5, window=window)
            return attention(layer["attention"], x, cache, self.head_dim, attend, prepare)

        def feed_forward(layer: Any, x: jax.Array) -> jax.Array:
            if "mlp" in layer:
                return gated_mlp(layer["mlp"], x)
            return mixture(layer, x, self.moe, is_token, experts) + shared_expert(layer, x)

        norm = partial(rms_norm, epsilon=self.epsilon)
        return run_decoder(params, token_ids, caches, self.windows, mixer, feed_forward, norm)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return project_logits(hidden, params["embedding"] if self.tied else params["lm_head"])
