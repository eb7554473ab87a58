"""Mixtral: plain attention, then a mixture of experts, in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.layer_kinds import require_silu
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.norm import rms_norm
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.transformer import (
    attention,
    attention_specs,
    decoder_specs,
    expert_specs,
    linear_spec,
    mixture,
    norm_spec,
    project_logits,
    run_decoder,
)
from tpu_serve.models.base import Experts


@dataclass(frozen=True, slots=True)
class Mixtral:
    """Sizes of a model; see `Model` for the functions.

    Attributes:
      window: a token sees so many, itself included; None for all before it.
    """

    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    moe: MoEConfig
    rope: Rope
    epsilon: float
    max_position: int
    tied: bool
    window: int | None

    @classmethod
    def from_config(cls, config: HFConfig) -> Mixtral:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        require_silu(config)
        window, max_position = config.optional_positive("sliding_window"), config.positive("max_position_embeddings")
        hidden, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
        head_dim = config.positive("head_dim", hidden // num_heads)
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden=hidden,
            num_layers=config.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.positive("num_key_value_heads", num_heads),
            head_dim=head_dim,
            moe=MoEConfig(
                num_experts=config.positive("num_experts"),
                top_k=config.positive("num_experts_per_tok"),
                hidden=hidden,
                intermediate=config.positive("intermediate_size"),
                renormalise=True,
            ),
            rope=Rope.from_config(config, head_dim, default_theta=1e6),
            epsilon=config.get("rms_norm_eps", 1e-5),
            max_position=max_position,
            tied=config.get("tie_word_embeddings", False),
            window=window if window is not None and window < max_position else None,
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.tied else ()

    def cache_layout(self, dtype: Any) -> CacheLayout:
        return CacheLayout((PagedCache(self.num_kv_heads, self.head_dim, self.window),) * self.num_layers, dtype)

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""
        layers = [self._layer_specs(f"model.layers.{layer}", dtype) for layer in range(self.num_layers)]
        return decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)

    def _layer_specs(self, prefix: str, dtype: Any) -> dict[str, Any]:
        # Published files say block_sparse_moe; transformers 5 holds the fused tensors under mlp.
        moe, fused = f"{prefix}.block_sparse_moe", f"{prefix}.mlp"
        attn = attention_specs(
            f"{prefix}.self_attn", self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype
        )
        return {
            "input_norm": norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            "attention": attn,
            "post_attention_norm": norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
            "router": linear_spec(
                f"{moe}.gate", self.hidden, self.moe.num_experts, dtype, (None, None), other_names=(f"{fused}.gate",)
            ),
            "experts": expert_specs(f"{moe}.experts", self.moe, dtype, ("w1", "w3", "w2"), f"{fused}.experts"),
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
        attend = partial(mixing.attend, scale=self.head_dim**-0.5, window=self.window)

        def mixer(_: None, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            def prepare(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                return rotate(q, cos_sin), rotate(k, cos_sin)

            return attention(layer["attention"], x, cache, self.head_dim, attend, prepare)

        return run_decoder(
            params, token_ids, caches, [None] * self.num_layers, mixer,
            feed_forward=lambda layer, x: mixture(layer, x, self.moe, is_token, experts),
            norm=partial(rms_norm, epsilon=self.epsilon),
        )  # fmt: skip

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return project_logits(hidden, params["embedding"] if self.tied else params["lm_head"])
