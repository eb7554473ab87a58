"""Gemma 4: a dense MLP and a mixture of experts side by side; window layers and global layers with other heads and other rotation.

The dense members of the family lack the mixture and are otherwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import CacheLayout, PagedCache
from tpu_serve.device.params import ParamSpec, Source
from tpu_serve.hf_config import HFConfig
from tpu_serve.kernels.fused_moe_v2.problem import Activation
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
from tpu_serve.layers.moe.routing import MoEConfig, Routing, route
from tpu_serve.layers.norm import rms_norm_wide
from tpu_serve.layers.rope import Rope, rotate
from tpu_serve.layers.transformer import (
    also_under,
    attention_specs,
    decoder_specs,
    expert_specs,
    expert_weights,
    gated_mlp_specs,
    linear,
    linear_spec,
    norm_spec,
    run_layers,
)
from tpu_serve.models.base import Experts

DEFAULT_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of one layer, of which there are few kinds.

    Attributes:
      window: a token sees so many, itself included; None for all before it.
      keys_are_values: values are made of what the key projection gives; the layer has none for values.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None
    keys_are_values: bool
    rope: Rope


@dataclass(frozen=True, slots=True)
class Gemma4:
    """Sizes of a model; see `Model` for the functions. What a config leaves out has the default of transformers' class.

    Attributes:
      intermediate: inner size of the dense MLP.
      layers: the attention of each.
      cap: of the logits; None without one.
    """

    vocab_size: int
    hidden: int
    intermediate: int
    num_heads: int
    layers: tuple[Heads, ...]
    moe: MoEConfig | None
    cap: float | None
    epsilon: float
    max_position: int
    tied: bool

    @classmethod
    def from_config(cls, config: HFConfig) -> Gemma4:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """
        refuse_unsupported(config, {"attention_bias": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False})
        kind = config.get("model_type", kind=str)
        if per_layer := config.values.get("hidden_size_per_layer_input", 256):
            raise ConfigError(
                f"config.json: hidden_size_per_layer_input {per_layer} is not supported for {kind}; supported is 0, which must be "
                f"given: left out, it means 256."
            )
        if (direction := config.get("use_bidirectional_attention", None)) not in (None, "vision"):
            raise ConfigError(
                f"config.json: use_bidirectional_attention {direction!r} is not supported for {kind}; supported are null and "
                f"'vision', which concerns images only."
            )
        hidden = config.positive("hidden_size")
        return cls(
            vocab_size=config.positive("vocab_size", 262144),
            hidden=hidden,
            intermediate=config.positive("intermediate_size"),
            num_heads=config.positive("num_attention_heads", 8),
            layers=_layers(config),
            moe=MoEConfig(
                num_experts=config.positive("num_experts"),
                top_k=config.positive("top_k_experts"),
                hidden=hidden,
                intermediate=config.positive("moe_intermediate_size"),
                renormalise=True,
                activation=Activation("gelu_tanh"),
            )
            if config.get("enable_moe_block", False)
            else None,
            cap=read_cap(config),
            epsilon=config.get("rms_norm_eps", 1e-6),
            max_position=config.positive("max_position_embeddings", 131072),
            tied=config.get("tie_word_embeddings", True),
        )

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        others = tuple(f"model.{part}.*" for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"))
        return (*others, "lm_head.weight") if self.tied else others

    def cache_layout(self, dtype: Any) -> CacheLayout:
        return CacheLayout(
            tuple(PagedCache(heads.num_kv_heads, heads.head_dim, heads.window) for heads in self.layers), dtype
        )

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""
        layers = [self._layer_specs(f"model.layers.{i}", heads, dtype) for i, heads in enumerate(self.layers)]
        specs = decoder_specs(self.vocab_size, self.hidden, layers, self.tied, dtype)
        return also_under(specs, "model.", "model.language_model.")

    def _layer_specs(self, prefix: str, heads: Heads, dtype: Any) -> dict[str, Any]:
        attn = f"{prefix}.self_attn"
        projections = attention_specs(attn, self.hidden, self.num_heads, heads.num_kv_heads, heads.head_dim, dtype)
        if heads.keys_are_values:
            del projections["v_proj"]

        def norm(name: str) -> ParamSpec:
            return norm_spec(f"{prefix}.{name}_layernorm", self.hidden, dtype)

        specs = {
            "input_norm": norm("input"),
            "attention": projections,
            "q_norm": norm_spec(f"{attn}.q_norm", heads.head_dim, dtype),
            "k_norm": norm_spec(f"{attn}.k_norm", heads.head_dim, dtype),
            "post_attention_norm": norm("post_attention"),
            "pre_mlp_norm": norm("pre_feedforward"),
            "mlp": gated_mlp_specs(f"{prefix}.mlp", self.hidden, self.intermediate, dtype),
            "post_feed_forward_norm": norm("post_feedforward"),
            "layer_scalar": _factors(f"{prefix}.layer_scalar", 1, dtype),
        }
        if self.moe is None:
            return specs
        num_experts, router = self.moe.num_experts, f"{prefix}.router"
        # The checkpoint's norms 1 and 2 are those of the MLP and of the experts.
        return specs | {
            "post_mlp_norm": norm_spec(f"{prefix}.post_feedforward_layernorm_1", self.hidden, dtype),
            "router": linear_spec(f"{router}.proj", self.hidden, num_experts, dtype, (None, None)),
            "router_scale": _factors(f"{router}.scale", self.hidden, dtype),
            "expert_scale": _factors(f"{router}.per_expert_scale", num_experts, dtype),
            "pre_experts_norm": norm_spec(f"{prefix}.pre_feedforward_layernorm_2", self.hidden, dtype),
            "experts": expert_specs(f"{prefix}.experts", self.moe, dtype),
            "post_experts_norm": norm_spec(f"{prefix}.post_feedforward_layernorm_2", self.hidden, dtype),
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
        turns = {rope: rope.cos_sin(positions) for rope in dict.fromkeys(heads.rope for heads in self.layers)}
        norm = partial(rms_norm_wide, epsilon=self.epsilon)

        def block(heads: Heads, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            attended, cache = self._attend(heads, layer, norm(x, layer["input_norm"]), cache, turns[heads.rope], mixing)
            x = x + norm(attended, layer["post_attention_norm"])
            update = gelu_mlp(layer["mlp"], norm(x, layer["pre_mlp_norm"]))
            if self.moe is not None:
                routing = self._route(self.moe, layer, x, is_token)
                with jax.named_scope("experts"):
                    chosen = experts(norm(x, layer["pre_experts_norm"]), routing, expert_weights(layer["experts"]))
                update = norm(update, layer["post_mlp_norm"]) + norm(chosen, layer["post_experts_norm"])
            return (x + norm(update, layer["post_feed_forward_norm"])) * layer["layer_scalar"], cache

        x = scaled_embedding(params["embedding"], token_ids)
        x, new_caches = run_layers(block, self.layers, params["layers"], x, caches)
        return norm(x, params["norm"]), new_caches

    @jax.named_scope("attention")
    def _attend(
        self, heads: Heads, layer: Any, x: jax.Array, cache: Any, cos_sin: tuple[jax.Array, jax.Array], mixing: Mixing
    ) -> tuple[jax.Array, Any]:
        """Attention of normed x [T, H]. Queries and keys are normed with weights and not scaled beyond that; values are normed without."""
        norm = partial(rms_norm_wide, epsilon=self.epsilon)
        projections = layer["attention"]
        names = ("q_proj", "k_proj", "k_proj" if heads.keys_are_values else "v_proj")
        q, k, v = (linear(projections, name, x).reshape(len(x), -1, heads.head_dim) for name in names)
        q, k = rotate(norm(q, layer["q_norm"]), cos_sin), rotate(norm(k, layer["k_norm"]), cos_sin)
        out, cache = mixing.attend(q, k, norm(v, None), cache, scale=1.0, window=heads.window)
        return linear(projections, "o_proj", out.reshape(len(x), -1)), cache

    def _route(self, moe: MoEConfig, layer: Any, x: jax.Array, is_token: jax.Array) -> Routing:
        """Of the residual stream x [T, H] itself, behind a norm of the router's own."""
        normed = rms_norm_wide(x, None, self.epsilon) * layer["router_scale"] * self.hidden**-0.5
        return route(normed, layer["router"], moe, is_token, expert_scale=layer["expert_scale"])

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]."""
        return capped_logits(hidden, params["embedding"] if self.tied else params["lm_head"], self.cap)


def _factors(name: str, size: int, dtype: Any) -> ParamSpec:
    """A vector whose checkpoint name has no ".weight"; ones where weights are random."""
    return ParamSpec((size,), dtype, (None,), (Source((name,), shape=(size,)),), scale=None)


def _layers(config: HFConfig) -> tuple[Heads, ...]:
    """The attention of each layer.

    Global layers have heads of their own: `global_head_dim` and, where keys are values, `num_global_key_value_heads`. transformers 5
    writes `per_layer_config` instead: by number of the layer what is not as in the rest of the config.
    """
    types = layer_types(config, 6)
    types = (*types[:-1], FULL)  # the class forces this
    window = config.positive("sliding_window", 512)
    shared = {
        "num_key_value_heads": config.positive("num_key_value_heads", 4),
        "head_dim": config.positive("head_dim", 256),
    }
    keys_are_values = config.get("attention_k_eq_v", False)
    ropes = {**DEFAULT_ROPES, **(config.get("rope_parameters", None, kind=dict) or {})}
    overrides = _overrides(config, types, keys_are_values)

    def heads(layer: int, kind: str) -> Heads:
        sizes = shared | overrides.get(layer, {})
        return Heads(
            num_kv_heads=sizes["num_key_value_heads"],
            head_dim=sizes["head_dim"],
            window=window if kind == SLIDING else None,
            keys_are_values=keys_are_values and kind == FULL,
            rope=Rope.from_parameters(ropes[kind], sizes["head_dim"], 1e4),
        )

    return tuple(heads(layer, kind) for layer, kind in enumerate(types))


def _overrides(config: HFConfig, types: tuple[str, ...], keys_are_values: bool) -> dict[int, dict[str, int]]:
    """Of the layers that have any: sizes that are not those of the others.

    Raises:
      ConfigError: `per_layer_config` names no layer of the model, or something else than the two sizes.
    """
    given = config.get("per_layer_config", None, kind=dict)
    if given is None:
        sizes = {"head_dim": config.positive("global_head_dim", 512)}
        if keys_are_values and (count := config.optional_positive("num_global_key_value_heads")) is not None:
            sizes["num_key_value_heads"] = count
        return {layer: sizes for layer, kind in enumerate(types) if kind == FULL}
    overrides = {}
    for name, sizes in given.items():  # names are padded with zeros: "05"
        if not name.isdecimal() or int(name) >= len(types) or not isinstance(sizes, dict):
            raise ConfigError(
                f"config.json: per_layer_config entry {name!r} is no object for one of {len(types)} layers."
            )
        for key, value in sizes.items():
            if key not in ("head_dim", "num_key_value_heads") or type(value) is not int or value < 1:
                raise ConfigError(
                    f"config.json: per_layer_config {key} {value!r} is not supported; supported are head_dim and num_key_value_heads "
                    f"of at least 1."
                )
        overrides[int(name)] = sizes
    return overrides
