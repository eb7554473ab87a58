"""Attention whose heads are scaled by a gate before the output projection (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.params import ParamSpec
from tpu_serve.layers.transformer import attention_specs, linear, linear_spec, offset_norm_spec


def gated_attention_specs(
    prefix: str, hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> dict[str, ParamSpec]:
    """Projections, and the norms of queries and keys. `q_proj` gives each head its query and then, as long, its gate.

    Raises:
      ConfigError: as `attention_specs`.
    """
    return attention_specs(prefix, hidden, num_heads, num_kv_heads, head_dim, dtype) | {
        "q_proj": linear_spec(
            f"{prefix}.q_proj", hidden, 2 * num_heads * head_dim, dtype, (None, "heads"), unit=2 * head_dim
        ),
        "q_norm": offset_norm_spec(f"{prefix}.q_norm", head_dim, dtype),
        "k_norm": offset_norm_spec(f"{prefix}.k_norm", head_dim, dtype),
    }


@jax.named_scope("attention")
def gated_attention(
    params: dict[str, jax.Array],
    x: jax.Array,
    cache: Any,
    head_dim: int,
    attend: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    prepare: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, Any]:
    """`o_proj(attended * sigmoid(gate))` of x [T, H]; `prepare` normalises and rotates queries [T, N, D] and keys [T, K, D]."""
    queries = linear(params, "q_proj", x).reshape(len(x), -1, 2, head_dim)
    q, gate = queries[:, :, 0], queries[:, :, 1]
    k, v = (linear(params, name, x).reshape(len(x), -1, head_dim) for name in ("k_proj", "v_proj"))
    out, cache = attend(*prepare(q, k), v, cache)
    out *= jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    return linear(params, "o_proj", out.reshape(len(x), -1)), cache
