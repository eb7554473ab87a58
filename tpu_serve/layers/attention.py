"""Attention over the paged KV cache, in plain XLA.

`paged_attention` has the signature that a TPU kernel for the same job takes.
Letters: T tokens, N query heads, K KV heads, D head size, S sequences, P pages a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import Batch

QUERY_BLOCK = 32
KV_BLOCK = 128
"""Tokens of the cache that one inner step reads, a multiple of every page size up to it."""
SHARING_PAYS = 16
"""With fewer queries in a block, a second way to read the keys costs more to compile than it saves."""
MASKED = -1e30


def pages_per_block(page_size: int) -> int:
    """Pages that one inner step reads. The width of a page table must be a multiple of it."""
    return max(1, KV_BLOCK // page_size)


def paged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, batch: Batch, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of this step's tokens over everything their sequences have cached.

    Writes the step's keys and values before it reads any, so sequences may share pages that are filled in this very step.

    Args:
      q: [T, N, D].
      k, v: [T, K, D], of this step's tokens.
      cache: [pages, page_size, 2 * K, D], keys at even heads; of q's type, or unsigned integers that hold its bits.
      batch: which token belongs where.
      scale: factor on the scores.

    Returns:
      [T, N, D], zero at padding rows, and the cache with the new keys and values.
    """
    _, page_size, num_heads, head_dim = cache.shape
    cache = _write(cache, jnp.stack([k, v], axis=2).reshape(len(k), num_heads, head_dim), batch.kv_index)
    size = min(QUERY_BLOCK, len(q))
    step = pages_per_block(page_size)
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
        num_steps = -(-jnp.max(block_lengths) // (step * page_size))

        def run(shared: bool, block_q: jax.Array) -> jax.Array:
            table = batch.page_table[block_rows[0]] if shared else batch.page_table[block_rows]

            def read(i: jax.Array) -> jax.Array:
                pages = jax.lax.dynamic_slice_in_dim(table, i * step, step, axis=-1)
                kv = cache[pages].reshape(*pages.shape[:-1], step * page_size, num_heads // 2, 2, head_dim)
                return kv if kv.dtype == q.dtype else jax.lax.bitcast_convert_type(kv, q.dtype)

            return _online_softmax(block_q, block_lengths, read, num_steps, step * page_size)

        # Within one sequence (a prefill chunk) all queries share the keys; otherwise each query gathers its own.
        if size < SHARING_PAYS:
            done = run(False, block_q)
        else:
            done = jax.lax.cond(one_sequence, lambda x: run(True, x), lambda x: run(False, x), block_q)
        return jax.lax.dynamic_update_slice_in_dim(out, done, index * size, axis=0)

    num_blocks = -(-batch.num_tokens // size)
    out = jax.lax.fori_loop(0, num_blocks, attend_block, jnp.zeros_like(q))
    return out.reshape(len(q), -1, head_dim)[: len(q) - tail], cache


def _write(cache: jax.Array, both: jax.Array, index: jax.Array) -> jax.Array:
    """The cache with `both` [T, 2 * K, D] at the flat places `index` [T]."""
    if cache.dtype != both.dtype:
        both = jax.lax.bitcast_convert_type(both, cache.dtype)
    return cache.reshape(-1, *cache.shape[2:]).at[index].set(both).reshape(cache.shape)


def _online_softmax(
    q: jax.Array, lengths: jax.Array, read: Callable[[jax.Array], jax.Array], num_steps: jax.Array, width: int
) -> jax.Array:
    """Attention of q [Q, K, G, D] over keys read block by block: `read(i)` gives [width, K, 2, D], or [Q, width, K, 2, D]."""

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        total, normaliser, highest = carry
        kv = read(i)
        letters = "wkd" if kv.ndim == 4 else "qwkd"
        keys, values = kv[..., 0, :], kv[..., 1, :]
        scores = jnp.einsum(f"qkgd,{letters}->kgqw", q, keys, preferred_element_type=jnp.float32)
        at = i * width + jnp.arange(width)
        visible = at < lengths[:, None]
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
    start = (
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape, MASKED, jnp.float32),
    )
    total, normaliser, _ = jax.lax.fori_loop(0, num_steps, body, start)
    out = total / jnp.maximum(normaliser, 1e-30)[..., None]  # a padding row sees no key: 0 / tiny = 0
    return out.transpose(2, 0, 1, 3).astype(q.dtype)
