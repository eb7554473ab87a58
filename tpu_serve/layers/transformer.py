"""The parts that the decoder families share: weight declarations, the layer loop and its sublayers.

Sublayers are scopes by name, so that whatever reads a compiled program can say what its instructions are for.
Letters: T tokens, H hidden, N query heads, K KV heads, D head size, I intermediate, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.device.params import ParamSpec, Source, map_specs, transposed
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing, route
from tpu_serve.layers.product import product, rows_of, table_product


def linear_spec(
    name: str,
    size_in: int,
    size_out: int,
    dtype: Any,
    axes: tuple[str | None, str | None],
    other_names: tuple[str, ...] = (),
    unit: int = 1,
) -> ParamSpec:
    """A projection `[in, out]` from the checkpoint's `name.weight` `[out, in]`, or from that of one of the other names.

    Args:
      unit: see `ParamSpec`.
    """
    sources = tuple(Source((f"{one}.weight",), transposed, (size_out, size_in)) for one in (name, *other_names))
    return ParamSpec((size_in, size_out), dtype, axes, sources, scale=size_in**-0.5, unit=unit)


def norm_spec(name: str, size: int, dtype: Any) -> ParamSpec:
    return ParamSpec((size,), dtype, (None,), (Source((f"{name}.weight",), shape=(size,)),), scale=None)


def offset_norm_spec(name: str, size: int, dtype: Any) -> ParamSpec:
    """The weight of a norm that multiplies by one more than it."""
    return dataclasses.replace(norm_spec(name, size, dtype), scale=0.02)


def bias_spec(name: str, size: int, dtype: Any, axis: str | None, unit: int = 1) -> ParamSpec:
    """A projection's bias `name.bias`, drawn small where weights are random."""
    return ParamSpec((size,), dtype, (axis,), (Source((f"{name}.bias",), shape=(size,)),), scale=0.02, unit=unit)


def embedding_spec(name: str, vocab: int, hidden: int, dtype: Any) -> ParamSpec:
    shape = (vocab, hidden)
    return ParamSpec(shape, dtype, ("vocab", None), (Source((f"{name}.weight",), shape=shape),), scale=0.5)


def attention_specs(
    prefix: str, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any, biases: str = ""
) -> dict[str, ParamSpec]:
    """Query, key, value and output projections.

    Args:
      biases: letters of the projections that have one, of "qkvo".

    Raises:
      ConfigError: the query heads cannot be shared out among the KV heads.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}."
        )
    sizes = {"q": (num_heads, "heads"), "k": (num_kv_heads, "kv_heads"), "v": (num_kv_heads, "kv_heads")}
    specs = {
        f"{letter}_proj": linear_spec(
            f"{prefix}.{letter}_proj", hidden, count * head_dim, dtype, (None, axis), unit=head_dim
        )
        for letter, (count, axis) in sizes.items()
    }
    specs["o_proj"] = linear_spec(
        f"{prefix}.o_proj", num_heads * head_dim, hidden, dtype, ("heads", None), unit=head_dim
    )
    for letter in biases:
        axis = sizes[letter][1] if letter in sizes else None
        specs[f"{letter}_proj_bias"] = bias_spec(
            f"{prefix}.{letter}_proj", specs[f"{letter}_proj"].shape[1], dtype, axis, head_dim
        )
    return specs


def expert_specs(
    prefix: str,
    config: MoEConfig,
    dtype: Any,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused_prefix: str | None = None,
) -> dict[str, ParamSpec]:
    """Experts in the canonical layout, from one 2-D tensor per expert and projection or from tensors that hold all experts.

    Those are `gate_up_proj [E, 2I, H]`, gate rows first, and `down_proj [E, H, I]`; or `wo [E, I, H]` and `wi`, gate columns first, either
    fused `[E, H, 2I]` or split `[2, E, H/2, 2I]`, which is the same memory.

    Args:
      names: of the gate, up and down projections of one expert.
      fused_prefix: of `gate_up_proj` and `down_proj`, when it is not `prefix`.
    """
    num_experts, hidden, inner = config.num_experts, config.hidden, config.intermediate
    gate, up, down = names
    fused = fused_prefix or prefix

    # All take any number of experts, so that a device's share can be read alone.
    def split_gate_up(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(-1, 2, inner, hidden).swapaxes(2, 3)

    def split_wi(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(-1, hidden, 2, inner).swapaxes(1, 2)

    def swap_down(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].swapaxes(1, 2)

    return {
        "gate_up": ParamSpec(
            (num_experts, 2, hidden, inner),
            dtype,
            ("experts", None, "expert_hidden", "expert_inner"),
            (
                Source(
                    tuple(f"{prefix}.{e}.{name}.weight" for e in range(num_experts) for name in (gate, up)),
                    split_gate_up,
                    (inner, hidden),
                    keys_per_row=2,
                ),
                Source((f"{fused}.gate_up_proj",), split_gate_up, (num_experts, 2 * inner, hidden), row_axis=0),
                Source((f"{prefix}.wi",), split_wi, (num_experts, hidden, 2 * inner), row_axis=0),
                Source((f"{prefix}.wi",), split_wi, (2, num_experts, hidden // 2, 2 * inner), row_axis=0),
            ),
            scale=hidden**-0.5,
        ),
        "down": ParamSpec(
            (num_experts, inner, hidden),
            dtype,
            ("experts", "expert_inner", "expert_hidden"),
            (
                Source(
                    tuple(f"{prefix}.{e}.{down}.weight" for e in range(num_experts)),
                    swap_down,
                    (hidden, inner),
                    keys_per_row=1,
                ),
                Source((f"{fused}.down_proj",), swap_down, (num_experts, hidden, inner), row_axis=0),
                Source((f"{prefix}.wo",), shape=(num_experts, inner, hidden)),
            ),
            scale=inner**-0.5,
        ),
    }


@jax.named_scope("experts")
def mixture(
    layer: dict[str, Any],
    x: jax.Array,
    config: MoEConfig,
    is_token: jax.Array,
    experts: Callable[[jax.Array, Routing, ExpertWeights], jax.Array],
) -> jax.Array:
    """The mixture of experts [T, H] -> [T, H] of a layer that holds `router`, perhaps `router_bias`, and `experts`."""
    routing = route(x, layer["router"], config, is_token, bias=layer.get("router_bias"))
    return experts(x, routing, expert_weights(layer["experts"]))


def expert_weights(params: dict[str, Any]) -> ExpertWeights:
    """The arrays of `expert_specs` as backends take them."""
    return ExpertWeights(
        gate_up=_values(params["gate_up"]),
        down=_values(params["down"]),
        gate_up_scale=_scale(params["gate_up"]),
        down_scale=_scale(params["down"]),
        gate_up_bias=params.get("gate_up_bias"),
        down_bias=params.get("down_bias"),
    )


def _values(weight: Any) -> jax.Array:
    return weight.values if isinstance(weight, QuantisedArray) else weight


def _scale(weight: Any) -> jax.Array | None:
    return weight.scale if isinstance(weight, QuantisedArray) else None


def linear(params: dict[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
    """`x @ params[name]`, and `params[name_bias]` added if there is one."""
    done = product(x, params[name])
    return done + params[f"{name}_bias"] if f"{name}_bias" in params else done


@jax.named_scope("attention")
def attention(
    params: dict[str, jax.Array],
    x: jax.Array,
    cache: Any,
    head_dim: int,
    attend: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    prepare: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, Any]:
    """Projections around `attend`; `prepare` normalises and rotates queries [T, N, D] and keys [T, K, D]."""
    q, k, v = (linear(params, name, x).reshape(len(x), -1, head_dim) for name in ("q_proj", "k_proj", "v_proj"))
    out, cache = attend(*prepare(q, k), v, cache)
    return linear(params, "o_proj", out.reshape(len(x), -1)), cache


@jax.named_scope("mlp")
def gated_mlp(
    params: dict[str, jax.Array], x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """`down(activation(gate(x)) * up(x))`."""
    inner = activation(product(x, params["gate_proj"])) * product(x, params["up_proj"])
    return product(inner, params["down_proj"])


def gated_mlp_specs(prefix: str, hidden: int, inner: int, dtype: Any) -> dict[str, ParamSpec]:
    return {
        "gate_proj": linear_spec(f"{prefix}.gate_proj", hidden, inner, dtype, (None, "mlp")),
        "up_proj": linear_spec(f"{prefix}.up_proj", hidden, inner, dtype, (None, "mlp")),
        "down_proj": linear_spec(f"{prefix}.down_proj", inner, hidden, dtype, ("mlp", None)),
    }


def decoder_specs(vocab: int, hidden: int, layers: list[dict[str, Any]], tied: bool, dtype: Any) -> dict[str, Any]:
    """The whole tree around the layers. A tied model has no `lm_head`: its embedding is the output table too."""
    specs = {
        "embedding": embedding_spec("model.embed_tokens", vocab, hidden, dtype),
        "layers": layers,
        "norm": norm_spec("model.norm", hidden, dtype),
    }
    return specs if tied else specs | {"lm_head": embedding_spec("lm_head", vocab, hidden, dtype)}


def also_under(specs: Any, prefix: str, other: str) -> Any:
    """The same tree, and a checkpoint's names may begin with `other` where they begin with `prefix`."""

    def add(_: str, spec: ParamSpec) -> ParamSpec:
        renamed = tuple(
            dataclasses.replace(
                source,
                keys=tuple(other + key.removeprefix(prefix) if key.startswith(prefix) else key for key in source.keys),
            )
            for source in spec.sources
        )
        return dataclasses.replace(
            spec, sources=spec.sources + tuple(one for one in renamed if one not in spec.sources)
        )

    return map_specs(add, specs)


@jax.named_scope("embedding")
def embed(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows [T, H] of the table [V, H]."""
    return rows_of(table, token_ids)


def run_layers(
    block: Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, Any]],
    kinds: Sequence[Any],
    layers: Sequence[Any],
    x: jax.Array,
    caches: Sequence[Any],
) -> tuple[jax.Array, list[Any]]:
    """One layer after the other; each kind is traced once for all its layers of one shape.

    Args:
      block: (kind, weights of the layer, [T, H], its cache) -> ([T, H], new cache).
      kinds: hashable, one per layer.
    """
    run = jax.jit(block, static_argnums=0)
    new_caches = []
    for kind, layer, cache in zip(kinds, layers, caches, strict=True):
        x, cache = run(kind, layer, x, cache)
        new_caches.append(cache)
    return x, new_caches


def run_decoder(
    params: Any,
    token_ids: jax.Array,
    caches: Sequence[Any],
    kinds: Sequence[Any],
    mixer: Callable[[Any, Any, jax.Array, Any], tuple[jax.Array, Any]],
    feed_forward: Callable[[Any, jax.Array], jax.Array],
    norm: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, list[Any]]:
    """Embedding, layers of a token mixer and a feed-forward part with a norm before each, final norm.

    Args:
      params: the arrays of `decoder_specs`; each layer holds `input_norm`, `post_attention_norm` and what the two functions read.
      token_ids: i32[T].
      caches, kinds: one per layer.
      mixer: (kind, layer, normed [T, H], cache) -> ([T, H], new cache).
      feed_forward: (layer, normed [T, H]) -> [T, H].
      norm: (x, weight) -> normed x.

    Returns:
      Hidden states [T, H] after the final norm, and the new caches.
    """

    def block(kind: Any, layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        update, cache = mixer(kind, layer, norm(x, layer["input_norm"]), cache)
        x = x + update
        return x + feed_forward(layer, norm(x, layer["post_attention_norm"])), cache

    x, new_caches = run_layers(block, kinds, params["layers"], embed(params["embedding"], token_ids), caches)
    return norm(x, params["norm"]), new_caches


@jax.named_scope("logits")
def project_logits(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """f32[..., V] logits from hidden [..., H] and an output table [V, H]."""
    return table_product(hidden, table)
