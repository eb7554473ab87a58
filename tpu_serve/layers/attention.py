"""Attention over the paged KV cache, in plain XLA.

`paged_attention` has the signature that a TPU kernel for the same job takes.
Letters: T tokens, N query heads, K KV heads, D head size, S sequences, P pages a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import Batch
from tpu_serve.device.kv_cache import narrowed
from tpu_serve.device.quantised import QuantisedArray

QUERY_BLOCK = 32
KV_BLOCK = 128
"""Tokens of the cache that one inner step reads, a multiple of every page size up to it."""
SHARING_PAYS = 16
"""With fewer queries in a block, a second way to read the keys costs more to compile than it saves."""
MASKED = -1e30

Cache = jax.Array | QuantisedArray


def pages_per_block(page_size: int) -> int:
    """Pages that one inner step reads. The width of a page table must be a multiple of it."""
    return max(1, KV_BLOCK // page_size)


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: Cache,
    batch: Batch,
    scale: float,
    *,
    window: int | None = None,
    table: int = 0,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, Cache]:
    """Causal attention of this step's tokens over what their sequences have cached.

    Writes the step's keys and values before it reads any, so sequences may share pages that are filled in this very step.

    Args:
      q: [T, N, D].
      k, v: [T, K, D], of this step's tokens.
      cache: of q's type, or unsigned integers that hold its bits; by token, [pages, page_size, 2 * K, D], or by head, [pages, K, page_size,
        2 * D], see `CacheLayout`. Or 8-bit values, perhaps unsigned for float8_e4m3fn, with their scales.
      batch: which token belongs where.
      scale: factor on the scores.
      window: a token sees so many keys, its own included; None for all. Pages that lie wholly behind it are not read.
      table: which of the batch's page tables is that of this layer.
      sinks: [N], a score per head that takes its share of the softmax and gives nothing; never scaled.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None for none.

    Returns:
      [T, N, D], zero at padding rows, and the cache with the new keys and values.
    """
    _, num_kv_heads, head_dim = k.shape
    num_heads, by_head = 2 * num_kv_heads, is_by_head(cache, k)
    page_size = _values(cache).shape[2 if by_head else 1]
    cache = _write(cache, jnp.stack([k, v], axis=2), batch.kv_index[table], by_head)
    size = min(QUERY_BLOCK, len(q))
    step = pages_per_block(page_size)
    width = step * page_size
    page_table = batch.page_table[table]
    # Score-side layout [T, K, G, D]: the G query heads of a KV head side by side.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(len(q), num_heads // 2, -1, head_dim)
    tail = -len(q) % size
    q = jnp.pad(q, ((0, tail), (0, 0), (0, 0), (0, 0)))
    rows = jnp.pad(batch.seq_of_token, (0, tail), constant_values=-1)
    lengths = jnp.where(rows >= 0, jnp.pad(batch.positions, (0, tail)) + 1, 0)  # keys that a token sees

    def attend_block(index: jax.Array, out: jax.Array) -> jax.Array:
        block_q, block_rows, block_lengths = (
            jax.lax.dynamic_slice_in_dim(part, index * size, size) for part in (q, rows, lengths)
        )
        one_sequence = jnp.all((block_rows == block_rows[0]) | (block_rows < 0))
        seen = Seen(block_lengths, window, width)

        def run(shared: bool, block_q: jax.Array) -> jax.Array:
            pages_of = page_table[block_rows[0]] if shared else page_table[block_rows]
            first = seen.first_block(shared)

            def read(i: jax.Array) -> jax.Array:
                if shared:
                    pages = jax.lax.dynamic_slice_in_dim(pages_of, (first + i) * step, step)
                elif window is None:
                    pages = jax.lax.dynamic_slice_in_dim(pages_of, i * step, step, axis=-1)
                else:  # every query reads on from its own first block; one that has no more reads what it does not see
                    at = jnp.minimum((first[:, None] + i) * step + jnp.arange(step), pages_of.shape[1] - 1)
                    pages = jnp.take_along_axis(pages_of, at, axis=1)
                kv = _read(cache, pages, q.dtype, head_dim, by_head)
                return kv.reshape(*pages.shape[:-1], width, num_heads // 2, 2, head_dim)

            return _online_softmax(block_q, seen, read, first, sinks, soft_cap)

        # Within one sequence (a prefill chunk) all queries share the keys; otherwise each query gathers its own.
        if size < SHARING_PAYS:
            done = run(False, block_q)
        else:
            done = jax.lax.cond(one_sequence, lambda x: run(True, x), lambda x: run(False, x), block_q)
        return jax.lax.dynamic_update_slice_in_dim(out, done, index * size, axis=0)

    num_blocks = -(-batch.num_tokens // size)
    out = jax.lax.fori_loop(0, num_blocks, attend_block, jnp.zeros_like(q))
    return out.reshape(len(q), -1, head_dim)[: len(q) - tail], cache


def is_by_head(cache: Cache, keys: jax.Array) -> bool:
    """Which of the two ways pages lie in, see `CacheLayout`; of `keys` [T, K, D] the shape is looked at."""
    return _values(cache).shape[-1] != keys.shape[-1]


def _values(cache: Cache) -> jax.Array:
    return cache.values if isinstance(cache, QuantisedArray) else cache


def _write(cache: Cache, both: jax.Array, index: jax.Array, by_head: bool) -> Cache:
    """The cache with `both` [T, K, 2, D] at the flat places `index` [T]."""
    if not isinstance(cache, QuantisedArray):
        return _put(cache, both, index, by_head)
    narrow, scale = narrowed(both, _stored_type(cache).name)
    values = _put(cache.values, narrow, index, by_head)
    if not by_head:
        return QuantisedArray(values, _put(cache.scale, scale, index, by_head))
    page_size = cache.scale.shape[-1]
    return QuantisedArray(values, cache.scale.at[index // page_size, :, :, index % page_size].set(scale))


def _put(array: jax.Array, rows: jax.Array, index: jax.Array, by_head: bool) -> jax.Array:
    if array.dtype != rows.dtype:
        rows = jax.lax.bitcast_convert_type(rows, array.dtype)
    if by_head:
        page_size = array.shape[2]
        return array.at[index // page_size, :, index % page_size].set(rows.reshape(*rows.shape[:2], -1))
    rows = rows.reshape(len(rows), *array.shape[2:])
    return array.reshape(-1, *array.shape[2:]).at[index].set(rows).reshape(array.shape)


def _read(cache: Cache, pages: jax.Array, dtype: Any, head_dim: int, by_head: bool) -> jax.Array:
    """Keys and values of pages [..., step] in the type of the queries: [..., step, page_size, 2 * K, D], or with K and 2 apart."""

    def by_token(found: jax.Array) -> jax.Array:
        if not by_head:
            return found
        split = found.reshape(*found.shape[:-1], 2, head_dim)
        return jnp.swapaxes(split, -4, -3)

    if not isinstance(cache, QuantisedArray):
        kv = by_token(cache[pages])
        return kv if kv.dtype == dtype else jax.lax.bitcast_convert_type(kv, dtype)
    narrow, scale = by_token(cache.values[pages]), cache.scale[pages]
    if by_head:
        scale = jnp.moveaxis(scale, -1, -3)
    stored = _stored_type(cache)
    narrow = narrow if narrow.dtype == stored else jax.lax.bitcast_convert_type(narrow, stored)
    return (narrow.astype(jnp.float32) * scale[..., None]).astype(dtype)


def _stored_type(cache: QuantisedArray) -> Any:
    """What the 8-bit values are: unsigned integers hold the bits of floats."""
    return jnp.dtype("int8" if cache.values.dtype == jnp.int8 else "float8_e4m3fn")


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys the queries of a block see, in blocks of `width` keys.

    Attributes:
      lengths: i32[Q], keys up to and with a query's own; 0 at padding rows.
    """

    lengths: jax.Array
    window: int | None
    width: int

    def first_block(self, shared: bool) -> jax.Array:
        """First block that is read: i32[] where the queries read together, otherwise i32[Q]."""
        if self.window is None:
            return jnp.zeros((), jnp.int32)
        if shared:  # padding rows see nothing and must not send the others back to the beginning
            first = jnp.min(jnp.where(self.lengths > 0, self.lengths, jnp.iinfo(jnp.int32).max))
            return jnp.maximum(first - self.window, 0) // self.width
        return jnp.maximum(self.lengths - self.window, 0) // self.width

    def num_steps(self, first: jax.Array) -> jax.Array:
        """Blocks from the first on until no query sees more."""
        return jnp.max(-(-self.lengths // self.width) - first)

    def visible(self, first: jax.Array, i: jax.Array) -> jax.Array:
        """bool[Q, width]: the keys of block `first + i` that each query sees."""
        at = (first[..., None] + i) * self.width + jnp.arange(self.width)
        lengths = self.lengths[:, None]
        seen = at < lengths
        return seen if self.window is None else seen & (at >= lengths - self.window)


def _online_softmax(
    q: jax.Array,
    seen: Seen,
    read: Callable[[jax.Array], jax.Array],
    first: jax.Array,
    sinks: jax.Array | None,
    soft_cap: float | None,
) -> jax.Array:
    """Attention of q [Q, K, G, D] over keys read block by block: `read(i)` gives [width, K, 2, D], or [Q, width, K, 2, D]."""

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        total, normaliser, highest = carry
        kv = read(i)
        letters = "wkd" if kv.ndim == 4 else "qwkd"
        keys, values = kv[..., 0, :], kv[..., 1, :]
        scores = jnp.einsum(f"qkgd,{letters}->kgqw", q, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = seen.visible(first, i)
        if kv.ndim == 4:
            # Weight 0 does not silence a NaN in a value, and all queries share the values here: tokens that see a bad one get NaN through
            # its score, and those before it, whose pages other requests may share, get nothing of it.
            good = jnp.isfinite(values).all(axis=(-2, -1))
            scores, values = jnp.where(good, scores, jnp.nan), jnp.where(good[:, None, None], values, 0)
        scores = jnp.where(visible, scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        if kv.ndim == 5:  # nor one that an earlier holder of the page left behind
            values = jnp.where(visible[..., None, None], values, 0)
        weights = jnp.where(visible, jnp.exp(scores - new_highest[..., None]), 0.0)
        shrink = jnp.exp(highest - new_highest)
        update = jnp.einsum(
            f"kgqw,{letters}->kgqd", weights.astype(q.dtype), values, preferred_element_type=jnp.float32
        )
        return total * shrink[..., None] + update, normaliser * shrink + weights.sum(axis=-1), new_highest

    num_queries, num_kv_heads, group, head_dim = q.shape
    shape = (num_kv_heads, group, num_queries)
    normaliser, highest = jnp.zeros(shape, jnp.float32), jnp.full(shape, MASKED, jnp.float32)
    if sinks is not None:  # a first key whose value is zero
        highest = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1), shape)
        normaliser = jnp.ones(shape, jnp.float32)
    start = (jnp.zeros((*shape, head_dim), jnp.float32), normaliser, highest)
    total, normaliser, _ = jax.lax.fori_loop(0, seen.num_steps(first), body, start)
    out = total / jnp.maximum(normaliser, 1e-30)[..., None]  # a padding row sees no key: 0 / tiny = 0
    return out.transpose(2, 0, 1, 3).astype(q.dtype)
