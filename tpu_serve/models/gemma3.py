"""Gemma 3: dense, with a norm before and after each half of a layer; most layers see a window only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.gemma import (
    capped_logits,
    gelu_mlp,
    layer_types,
    read_cap,
    refuse_unsupported,
    scaled_embedding,
)
from tpu_serve.layers.layer_kinds import FULL, SLIDING
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.norm import rms_norm_wide
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.transformer import (
    also_under,
    attention,
    attention_specs,
    decoder_specs,
    gated_mlp_specs,
    norm_spec,
    run_layers,
)
from tpu_serve.models.base import Experts

DEFAULT_THETAS = {FULL: 1e6, SLIDING: 1e4}


@dataclass(frozen=True, slots=True)
class Gemma3:
    """Sizes of a model; see `Model` for the functions. What a config leaves out has the default of transformers' class: published
    configs rely on that.

    Attributes:
      layer_types: `FULL` or `SLIDING` for each layer.
      window: a token of a sliding layer sees so many, itself included.
      ropes: by type of layer, in the order full, sliding.
      score_scale: factor on the scores of attention.
      cap: of the logits; None without one.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    window: int
    ropes: tuple[Rope, Rope]
    score_scale: float
    cap: float | None
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> Gemma3:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        refuse_unsupported(
            config,
            {"attention_bias": False, "use_bidirectional_attention": False, "attn_logit_softcapping": None},
        )
        head_dim = config.positive("head_dim", 256)
        return cls(
            vocab_size=config.positive("vocab_size", 262208),
            hidden=config.positive("hidden_size"),
            intermediate=config.positive("intermediate_size"),
            num_heads=config.positive("num_attention_heads", 8),
            num_kv_heads=config.positive("num_key_value_heads", 4),
            head_dim=head_dim,
            layer_types=layer_types(config, config.positive("sliding_window_pattern", 6)),
            window=config.positive("sliding_window", 4096),
            ropes=_ropes(config, head_dim),
            score_scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
            cap=read_cap(config),
            epsilon=config.get("rms_norm_eps", 1e-6),
            max_position=config.positive("max_position_embeddings", 131072),
            tied=config.get("tie_word_embeddings", True),
        )

    @property
    def moe(self) -> None:
        return None

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        images = tuple(
            f"{prefix}{part}.*" for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
        )
        return (*images, "lm_head.weight", "language_model.lm_head.weight") if self.tied else images

    def _window(self, kind: str) -> int | None:
        return self.window if kind == SLIDING else None

    def cache_layout(self, dtype: Any) -> CacheLayout:
        return CacheLayout(
            tuple(PagedCache(self.num_kv_heads, self.head_dim, self._window(kind)) for kind in self.layer_types), dtype
        )

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`. Published multimodal files nest the text model one way, those of transformers 5 another."""
        layers = [self._layer_specs(f"model.layers.{layer}", dtype) for layer in range(len(self.layer_types))]
        specs = decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)
        published = also_under(
            also_under(specs, "model.", "language_model.model."), "lm_head", "language_model.lm_head"
        )
        return also_under(published, "model.", "model.language_model.")

    def _layer_specs(self, prefix: str, dtype: Any) -> dict[str, Any]:
        attn = f"{prefix}.self_attn"
        return {
            "input_norm": norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            "attention": attention_specs(attn, self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype),
            "q_norm": norm_spec(f"{attn}.q_norm", self.head_dim, dtype),
            "k_norm": norm_spec(f"{attn}.k_norm", self.head_dim, dtype),
            "post_attention_norm": norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
            "pre_mlp_norm": norm_spec(f"{prefix}.pre_feedforward_layernorm", self.hidden, dtype),
            "mlp": gated_mlp_specs(f"{prefix}.mlp", self.hidden, self.intermediate, dtype),
            "post_mlp_norm": norm_spec(f"{prefix}.post_feedforward_layernorm", self.hidden, dtype),
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
        turns = {kind: rope.cos_sin(positions) for kind, rope in zip((FULL, SLIDING), self.ropes, strict=True)}
        norm = partial(rms_norm_wide, epsilon=self.epsilon, offset=1.0)

        def block(kind: str, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            def prepare(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
                return rotate(norm(q, layer["q_norm"]), turns[kind]), rotate(norm(k, layer["k_norm"]), turns[kind])

            attend = partial(mixing.attend, scale=self.score_scale, window=self._window(kind))
            update, cache = attention(
                layer["attention"], norm(x, layer["input_norm"]), cache, self.head_dim, attend, prepare
            )
            x = x + norm(update, layer["post_attention_norm"])
            return x + norm(gelu_mlp(layer["mlp"], norm(x, layer["pre_mlp_norm"])), layer["post_mlp_norm"]), cache

        x = scaled_embedding(params["embedding"], token_ids)
        x, new_caches = run_layers(block, self.layer_types, params["layers"], x, caches)
        return norm(x, params["norm"]), new_caches

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return capped_logits(hidden, params["embedding"] if self.tied else params["lm_head"], self.cap)


def _ropes(config: HFConfig, head_dim: int) -> tuple[Rope, Rope]:
    """Of full and of sliding layers: from `rope_parameters` per type, or from the older keys, where `rope_scaling` is that of full ones."""
    full = {"rope_theta": config.get("rope_theta", None), **(config.get("rope_scaling", None, kind=dict) or {})}
    older = {FULL: full, SLIDING: {"rope_theta": config.get("rope_local_base_freq", None)}}
    entries = {**older, **(config.get("rope_parameters", None, kind=dict) or {})}
    read = [Rope.from_parameters(entries[kind], head_dim, theta) for kind, theta in DEFAULT_THETAS.items()]
    return read[0], read[1]
