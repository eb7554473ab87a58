"""The parts that the decoder families share: weight declarations, the layer loop and its sublayers.

Letters: T tokens, H hidden, N query heads, K KV heads, D head size, I intermediate, E experts, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.device.params import ParamSpec, Source, transposed
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing, route
from tpu_serve.layers.norm import rms_norm


def linear_spec(
    name: str,
    size_in: int,
    size_out: int,
    dtype: Any,
    axes: tuple[str | None, str | None],
    other_names: tuple[str, ...] = (),
) -> ParamSpec:
    """A projection `[in, out]` from the checkpoint's `name.weight` `[out, in]`, or from that of one of the other names."""
    sources = tuple(Source((f"{one}.weight",), transposed, (size_out, size_in)) for one in (name, *other_names))
    return ParamSpec((size_in, size_out), dtype, axes, sources, scale=size_in**-0.5)


def norm_spec(name: str, size: int, dtype: Any) -> ParamSpec:
    return ParamSpec((size,), dtype, (None,), (Source((f"{name}.weight",), shape=(size,)),), scale=None)


def embedding_spec(name: str, vocab: int, hidden: int, dtype: Any) -> ParamSpec:
    shape = (vocab, hidden)
    return ParamSpec(shape, dtype, ("vocab", None), (Source((f"{name}.weight",), shape=shape),), scale=0.5)


def attention_specs(
    prefix: str, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> dict[str, ParamSpec]:
    """Query, key, value and output projections without biases.

    Raises:
      ConfigError: the query heads cannot be shared out among the KV heads.
    """
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}."
        )
    return {
        "q_proj": linear_spec(f"{prefix}.q_proj", hidden, num_heads * head_dim, dtype, (None, "heads")),
        "k_proj": linear_spec(f"{prefix}.k_proj", hidden, num_kv_heads * head_dim, dtype, (None, "kv_heads")),
        "v_proj": linear_spec(f"{prefix}.v_proj", hidden, num_kv_heads * head_dim, dtype, (None, "kv_heads")),
        "o_proj": linear_spec(f"{prefix}.o_proj", num_heads * head_dim, hidden, dtype, ("heads", None)),
    }


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

    def stack_gate_up(arrays: list[np.ndarray]) -> np.ndarray:
        return np.stack(arrays).reshape(num_experts, 2, inner, hidden).swapaxes(2, 3)

    def split_gate_up(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(num_experts, 2, inner, hidden).swapaxes(2, 3)

    def split_wi(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(num_experts, hidden, 2, inner).swapaxes(1, 2)

    return {
        "gate_up": ParamSpec(
            (num_experts, 2, hidden, inner),
            dtype,
            ("experts", None, "expert_hidden", "expert_inner"),
            (
                Source(
                    tuple(f"{prefix}.{e}.{name}.weight" for e in range(num_experts) for name in (gate, up)),
                    stack_gate_up,
                    (inner, hidden),
                ),
                Source((f"{fused}.gate_up_proj",), split_gate_up, (num_experts, 2 * inner, hidden)),
                Source((f"{prefix}.wi",), split_wi, (num_experts, hidden, 2 * inner)),
                Source((f"{prefix}.wi",), split_wi, (2, num_experts, hidden // 2, 2 * inner)),
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
                    lambda arrays: np.stack(arrays).swapaxes(1, 2),
                    (hidden, inner),
                ),
                Source((f"{fused}.down_proj",), lambda arrays: arrays[0].swapaxes(1, 2), (num_experts, hidden, inner)),
                Source((f"{prefix}.wo",), shape=(num_experts, inner, hidden)),
            ),
            scale=inner**-0.5,
        ),
    }


def mixture(
    layer: dict[str, Any],
    x: jax.Array,
    config: MoEConfig,
    is_token: jax.Array,
    experts: Callable[[jax.Array, Routing, ExpertWeights], jax.Array],
) -> jax.Array:
    """The mixture of experts [T, H] -> [T, H] of a layer that holds `router` and `experts`, the arrays of `expert_specs`."""
    weights = ExpertWeights(layer["experts"]["gate_up"], layer["experts"]["down"])
    return experts(x, route(x, layer["router"], config, is_token), weights)


def attention(
    params: dict[str, jax.Array],
    x: jax.Array,
    cache: Any,
    head_dim: int,
    attend: Callable[..., tuple[jax.Array, Any]],
    prepare: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, Any]:
    """Projections around `attend`; `prepare` normalises and rotates queries [T, N, D] and keys [T, K, D]."""
    q, k, v = (jnp.dot(x, params[name]).reshape(len(x), -1, head_dim) for name in ("q_proj", "k_proj", "v_proj"))
    out, cache = attend(*prepare(q, k), v, cache)
    return jnp.dot(out.reshape(len(x), -1), params["o_proj"]), cache


def gated_mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`."""
    return jnp.dot(jax.nn.silu(jnp.dot(x, params["gate_proj"])) * jnp.dot(x, params["up_proj"]), params["down_proj"])


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


def run_decoder(
    params: Any,
    token_ids: jax.Array,
    caches: list[Any],
    attend: Callable[..., tuple[jax.Array, Any]],
    *,
    head_dim: int,
    epsilon: float,
    prepare: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    feed_forward: Callable[[Any, jax.Array], jax.Array],
) -> tuple[jax.Array, list[Any]]:
    """Embedding, layers of attention and feed-forward part with a norm before each, final norm.

    Args:
      params: the arrays of `decoder_specs`; each layer holds `input_norm`, `attention`, `post_attention_norm` and what the two
        functions read.
      token_ids: i32[T].
      caches: one per layer, handed to `attend`.
      prepare: (layer, queries [T, N, D], keys [T, K, D]) -> both as attention compares them: normalised, rotated.
      feed_forward: (layer, normed [T, H]) -> [T, H].

    Returns:
      Hidden states [T, H] after the final norm, and the new caches.
    """

    @jax.jit  # traced once for all layers of one shape
    def run_layer(layer: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        normed = rms_norm(x, layer["input_norm"], epsilon)
        update, cache = attention(
            layer["attention"], normed, cache, head_dim, attend, functools.partial(prepare, layer)
        )
        x = x + update
        return x + feed_forward(layer, rms_norm(x, layer["post_attention_norm"], epsilon)), cache

    x, new_caches = params["embedding"][token_ids], []
    for layer, cache in zip(params["layers"], caches, strict=True):
        x, cache = run_layer(layer, x, cache)
        new_caches.append(cache)
    return rms_norm(x, params["norm"], epsilon), new_caches


def project_logits(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """f32[..., V] logits from hidden [..., H] and an output table [V, H]."""
    return jnp.einsum("...h,vh->...v", hidden, table, preferred_element_type=jnp.float32)
