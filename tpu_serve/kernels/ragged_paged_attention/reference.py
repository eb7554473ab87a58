"""The truth that the kernel is held to, in plain JAX and float32: every token against all that its sequence could hold, at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import Batch
from tpu_serve.device.quantised import QuantisedArray

F32 = jnp.float32


def keys_and_values(cache: Any, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[S, P * page size, K, D] each, of all pages in a page table i32[S, P]; the cache is by head, see `CacheLayout`."""
    if isinstance(cache, QuantisedArray):
        key, value = jnp.split(cache.values.astype(F32), 2, axis=-1)
        parts = [key * cache.scale[:, :, 0, :, None], value * cache.scale[:, :, 1, :, None]]
    else:
        parts = jnp.split(cache.astype(F32), 2, axis=-1)
    found = [part[table].swapaxes(2, 3) for part in parts]
    key, value = (part.reshape(len(table), -1, *part.shape[3:]) for part in found)
    return key, value


def attention(
    q: jax.Array,
    cache: Any,
    batch: Batch,
    scale: float,
    *,
    window: int | None = None,
    table: int = 0,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """f32[T, N, D] over a cache that holds this step's keys and values already; zero at padding tokens."""
    keys, values = (part[batch.seq_of_token] for part in keys_and_values(cache, batch.page_table[table]))
    num_tokens, num_keys, num_kv_heads, head_dim = keys.shape
    query = (q.astype(F32) * scale).reshape(num_tokens, num_kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgd,twkd->tkgw", query, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    position, key = batch.positions[:, None], jnp.arange(num_keys)
    seen = (key <= position) & (batch.seq_of_token >= 0)[:, None]
    if window is not None:
        seen &= key > position - window
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        extra = sinks.astype(F32).reshape(1, num_kv_heads, -1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(extra, (*scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_keys]
    values = jnp.where(seen[:, :, None, None], values, 0.0)  # zero times NaN is NaN
    out = jnp.einsum("tkgw,twkd->tkgd", jnp.where(seen[:, None, None], weights, 0.0), values, precision="highest")
    return out.reshape(q.shape)
