"""Attention of a step's batch through the kernel: the entry of this package.

Letters as in `problem.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import Batch
from tpu_serve.device.kv_cache import narrowed
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.ragged_paged_attention.config import Config, heuristic
from tpu_serve.kernels.ragged_paged_attention.kernel import Operands, attention
from tpu_serve.kernels.ragged_paged_attention.problem import LANES, LOG2_E, TABLE_CHUNK, Problem, round_up

Cache = jax.Array | QuantisedArray


def problem_of(
    q: Any, k: Any, cache: Any, batch: Batch, *, window: int | None, soft_cap: float | None, has_sinks: bool
) -> Problem:
    """What a call asks for, from shapes and types alone; arguments as in `ragged_paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    values = cache.values if isinstance(cache, QuantisedArray) else cache
    _, num_rows, max_pages = batch.page_table.shape
    stored = None if values is cache else jnp.dtype(values.dtype).name
    return Problem(
        num_tokens, num_rows, max_pages, num_heads, k.shape[1], head_dim, values.shape[2], window, soft_cap, has_sinks,
        jnp.dtype(q.dtype).name, stored,
    )  # fmt: skip


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Cache,
    batch: Batch,
    scale: float,
    *,
    context: Context,
    window: int | None = None,
    table: int = 0,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    config: Config | None = None,
) -> tuple[jax.Array, Cache]:
    """See `layers.attention.paged_attention`, which this stands in for. Every row in use has at least one token.

    Args:
      cache: [pages, K, page size, 2 * D] of q's type, a token's key before its value; or 8-bit values with scales
        f32[pages, K, 2, page size].
      context: where the kernel runs.
      config: how it is cut; `config.heuristic` when left out.

    Raises:
      ValueError: `config.supports` says why.
    """
    p = problem_of(q, k, cache, batch, window=window, soft_cap=soft_cap, has_sinks=sinks is not None)
    config = config or heuristic(p, context.chip)
    factor = scale if p.soft_cap is not None else scale * LOG2_E
    q = _padded((q.astype(jnp.float32) * factor).astype(q.dtype), 2, p.query_lanes)
    decodes = q[: p.num_decodes].reshape(p.num_decodes, p.num_kv_heads, p.group, p.query_lanes)
    lengths = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    rows = jnp.arange(p.num_rows, dtype=jnp.int32)
    num_decodes = jnp.min(jnp.where((lengths == 1) & (rows < batch.num_seqs), p.num_rows, rows))
    pages, scales = (cache.values, cache.scale) if isinstance(cache, QuantisedArray) else (cache, None)
    new, new_scales, decode_new, decode_scales = _new(p, k, v)
    operands = Operands(
        batch.cu_q_lens,
        batch.kv_lens,
        batch.kv_index[table],
        jnp.stack([num_decodes, batch.num_tokens]),
        _padded(batch.page_table[table], 1, round_up(p.max_pages, TABLE_CHUNK)).reshape(-1, 1, TABLE_CHUNK),
        _padded(decodes, 2, p.decode_rows),
        _padded(q.reshape(p.num_tokens, -1), 0, round_up(p.num_tokens, config.query_tile)),
        decode_new,
        decode_scales,
        new,
        new_scales,
        None if sinks is None else _sinks(p, sinks),
        pages,
        scales,
    )
    decoded, prompts, pages, scales = attention(p, config, context, operands)
    decoded = decoded[:, :, : p.group].reshape(p.num_decodes, -1)
    token = jnp.arange(p.num_decodes)[:, None]
    out = prompts[: p.num_tokens]
    front = jnp.where(token < num_decodes, decoded, out[: p.num_decodes])
    out = jax.lax.dynamic_update_slice_in_dim(out, front, 0, axis=0)
    out = out.reshape(p.num_tokens, p.num_heads, p.query_lanes)[..., p.query_lanes - p.head_dim :]
    return out, pages if scales is None else QuantisedArray(pages, scales)


def _padded(array: jax.Array, axis: int, size: int) -> jax.Array:
    """Filled up with zeros at the end of an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths)


def _new(p: Problem, k: jax.Array, v: jax.Array) -> tuple[jax.Array | None, ...]:
    """This step's keys and values as the kernel takes them, their scales, and both of decodes; 8-bit values are exact in the type of the queries."""
    scales = decode_scales = None
    if p.stored is not None:
        both, scale = narrowed(jnp.stack([k, v]), p.stored)
        k, v = both.astype(jnp.float32).astype(p.dtype)
        size = round_up(p.num_tokens, p.segment) + p.segment
        scales = _padded(scale.transpose(2, 0, 1), 2, size)
        of_decodes = scale[:, : p.num_decodes].transpose(1, 2, 0)[..., None]
        decode_scales = jnp.broadcast_to(of_decodes, (*of_decodes.shape[:3], p.segment))
    both = jnp.concatenate([k, v], axis=-1)
    decode_new = both[: p.num_decodes].astype(jnp.float32).reshape(-1, p.lanes)
    return _padded(both.transpose(1, 0, 2), 1, round_up(p.num_tokens, p.granule)), scales, decode_new, decode_scales


def _sinks(p: Problem, sinks: jax.Array) -> jax.Array:
    """A sink for each row of a decode's matrix, in all lanes, to the base 2 as scores are."""
    rows = _padded((sinks.astype(jnp.float32) * LOG2_E).reshape(p.num_kv_heads, p.group), 1, p.decode_rows)
    return jnp.broadcast_to(rows[:, :, None], (*rows.shape, LANES))
