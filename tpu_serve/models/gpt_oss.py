"""GPT-OSS: attention with sinks and, in every second layer, a window; then a mixture of experts. Biases everywhere."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.device.params import ParamSpec, Source
from tpu_serve.hf_config import HFConfig
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.layers.layer_kinds import read_windows, require_silu
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.norm import rms_norm_wide
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.transformer import (
    attention,
    attention_specs,
    bias_spec,
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
class GptOss:
    """Sizes of a model; see `Model` for the functions.

    Attributes:
      biases: letters of the attention projections that have one, of "qkvo".
      windows: per layer, how many keys a token sees, its own included; None for all before it.
    """

    vocab_size: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    biases: str
    moe: MoEConfig
    windows: tuple[int | None, ...]
    rope: Rope
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> GptOss:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        require_silu(config)
        if "rope_scaling" not in config.values:
            raise ConfigError(
                f"{config.file}: gpt_oss needs rope_scaling; null, or rope_type 'default', is plain RoPE."
            )
        hidden, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
        head_dim = config.positive("head_dim", 64)
        return cls(
            vocab_size=config.positive("vocab_size"),
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=config.positive("num_key_value_heads", num_heads),
            head_dim=head_dim,
            biases="qkvo" if config.get("attention_bias", True) else "",
            moe=MoEConfig(
                num_experts=config.positive("num_experts"),
                top_k=config.positive("num_experts_per_tok"),
                hidden=hidden,
                intermediate=config.positive("intermediate_size"),
                renormalise=True,
                has_biases=True,
                activation=Activation(
                    "swigluoai", limit=config.get("swiglu_limit", 7.0), alpha=config.get("swiglu_alpha", 1.702)
                ),
            ),
            windows=read_windows(config, lambda layer: layer % 2 == 0),
            rope=Rope.from_config(config, head_dim, default_theta=1.5e5),
            epsilon=config.get("rms_norm_eps", 1e-5),
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
        layers = [self._layer_specs(f"model.layers.{layer}", dtype) for layer in range(len(self.windows))]
        return decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)

    def _layer_specs(self, prefix: str, dtype: Any) -> dict[str, Any]:
        attn, router, num_experts = f"{prefix}.self_attn", f"{prefix}.mlp.router", self.moe.num_experts
        sinks = (Source((f"{attn}.sinks",), shape=(self.num_heads,)),)
        return {
            "input_norm": norm_spec(f"{prefix}.input_layernorm", self.hidden, dtype),
            "attention": attention_specs(
                attn, self.hidden, self.num_heads, self.num_kv_heads, self.head_dim, dtype, self.biases
            ),
            "sinks": ParamSpec((self.num_heads,), dtype, ("heads",), sinks, scale=1.0),
            "post_attention_norm": norm_spec(f"{prefix}.post_attention_layernorm", self.hidden, dtype),
            "router": linear_spec(router, self.hidden, num_experts, dtype, (None, None)),
            "router_bias": bias_spec(router, num_experts, dtype, None),
            "experts": _expert_specs(f"{prefix}.mlp.experts", self.moe, dtype),
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

            attend = partial(mixing.attend, scale=self.head_dim**-0.5, window=window, sinks=layer["sinks"])
            return attention(layer["attention"], x, cache, self.head_dim, attend, prepare)

        return run_decoder(
            params, token_ids, caches, self.windows, mixer,
            feed_forward=lambda layer, x: mixture(layer, x, self.moe, is_token, experts),
            norm=partial(rms_norm_wide, epsilon=self.epsilon),
        )  # fmt: skip

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return project_logits(hidden, params["embedding"] if self.tied else params["lm_head"])


def _expert_specs(prefix: str, config: MoEConfig, dtype: Any) -> dict[str, ParamSpec]:
    """Experts and their biases, from tensors that hold all experts or from those of each one.

    The former are published as `gate_up_proj` [E, H, 2I], each gate column before that of its up projection, and `down_proj` [E, I, H].
    The other families' tensors of the same names are the other way round: they are not read here, some sizes would allow both.
    """
    num_experts, hidden, inner = config.num_experts, config.hidden, config.intermediate

    def interleaved(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(-1, hidden, inner, 2).transpose(0, 3, 1, 2)

    def interleaved_bias(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(-1, 1, inner, 2).transpose(0, 3, 1, 2)

    def one_by_one(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{expert}.{name}.bias" for expert in range(num_experts) for name in names)

    published = {
        "gate_up": Source((f"{prefix}.gate_up_proj",), interleaved, (num_experts, hidden, 2 * inner), row_axis=0),
        "down": Source((f"{prefix}.down_proj",), shape=(num_experts, inner, hidden)),
    }
    biases = {
        "gate_up_bias": ParamSpec(
            (num_experts, 2, 1, inner),
            jnp.float32,
            ("experts", None, None, "expert_inner"),
            (
                Source((f"{prefix}.gate_up_proj_bias",), interleaved_bias, (num_experts, 2 * inner), row_axis=0),
                Source(
                    one_by_one("gate_proj", "up_proj"),
                    lambda arrays: np.stack(arrays).reshape(-1, 2, 1, inner),
                    (inner,),
                ),
            ),
        ),
        "down_bias": ParamSpec(
            (num_experts, 1, hidden),
            jnp.float32,
            ("experts", None, "expert_hidden"),
            (
                Source(
                    (f"{prefix}.down_proj_bias",), lambda arrays: arrays[0][:, None], (num_experts, hidden), row_axis=0
                ),
                Source(one_by_one("down_proj"), lambda arrays: np.stack(arrays)[:, None], (hidden,)),
            ),
        ),
    }

    def first(source: Source, spec: ParamSpec) -> ParamSpec:
        others = tuple(other for other in spec.sources if other.keys != source.keys)
        return dataclasses.replace(spec, sources=(source, *others))

    weights = expert_specs(prefix, config, dtype)
    return {name: first(published[name], spec) for name, spec in weights.items()} | biases
