"""Qwen3: the dense relation of Qwen3-MoE, an MLP in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.layer_kinds import read_windows, require_silu
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.norm import rms_norm
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.transformer import (
    attention,
    attention_specs,
    decoder_specs,
    gated_mlp,
    gated_mlp_specs,
    norm_spec,
    project_logits,
    run_decoder,
)
from tpu_serve.models.base import Experts


@dataclass(frozen=True, slots=True)
class Qwen3:
    """Sizes of a model; see `Model` for the functions.

    Attributes:
      biases: letters of the attention projections that have one, of "qkvo".
      windows: per layer, how many keys a token sees, its own included; None for all before it.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    biases: str
    windows: tuple[int | None, ...]
    rope: Rope
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> Qwen3:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        require_silu(config)
        num_heads, head_dim = config.positive("num_attention_heads"), config.positive("head_dim", 128)
        slides = config.get("use_sliding_window", False) and config.get("sliding_window", None) is not None
        first_sliding = config.get("max_window_layers", 28)
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden=config.positive("hidden_size"),
            intermediate=config.positive("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=config.positive("num_key_value_heads", num_heads),
            head_dim=head_dim,
            biases="qkvo" if config.get("attention_bias", False) else "",
            windows=read_windows(config, lambda layer: slides and layer >= first_sliding),
            rope=Rope.from_config(config, head_dim, default_theta=1e4),
            epsilon=config.get("rms_norm_eps", 1e-6),
            max_position=config.positive("max_position_embeddings"),
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def moe(self) -> None:
        return None

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.tied else ()

    def cache_layout(self, dtype: Any) -> CacheLayout:
        layers = tuple(PagedCache(self.num_kv_heads, self.head_dim, window) for window in self.windows)
        return CacheLayout(layers, dtype)

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""
        layers = [self._layer_specs(f"model.layers.{layer}", dtype) for layer in range(len(self.windows))]
        return decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)

    def _layer_specs(self, prefix: str, dtype: Any) -> dict[str, Any]:
        attn = f"{prefix}.self_attn"
        return {
            "input_norm": norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            "attention": attention_specs(
                attn, self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.biases
            ),
            "q_norm": norm_spec(f"{attn}.q_norm", self.head_dim, dtype),
            "k_norm": norm_spec(f"{attn}.k_norm", self.head_dim, dtype),
            "post_attention_norm": norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
            "mlp": gated_mlp_specs(f"{prefix}.mlp", self.hidden, self.intermediate, dtype),
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

        def mixer(window: int | None, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            def prepare(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                return rotate(norm(q, layer["q_norm"]), cos_sin), rotate(norm(k, layer["k_norm"]), cos_sin)

            attend = partial(mixing.attend, scale=self.head_dim**-0.5, window=window)
            return attention(layer["attention"], x, cache, self.head_dim, attend, prepare)

        return run_decoder(
            params, token_ids, caches, self.windows, mixer,
            feed_forward=lambda layer, x: gated_mlp(layer["mlp"], x),
            norm=norm,
        )  # fmt: skip

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return project_logits(hidden, params["embedding"] if self.tied else params["lm_head"])
