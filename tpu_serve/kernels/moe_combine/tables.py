"""Where the rows of a token block lie: plain JAX, one histogram and running sums; nothing is sorted, gathered or scattered.

Rows are in order of expert and, within an expert, of token and choice. So the rows of one token block that went to one expert are one range,
and a block needs at most one copy per expert instead of one per row. Copies move granules of `align` rows. The window of a range is its granules
that no earlier window of the block has: ranges that share a granule get neighbouring windows, and a row has exactly one place in the buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_serve.kernels.moe_combine.problem import Config, Problem, num_blocks, padded_experts


class Tables(NamedTuple):
    """Of every token block; B blocks, E experts.

    Attributes:
      windows: i32[B, 1, `problem.table_width`]. For each expert, in granules: the window's first granule in the rows; its size, 0 for none; its place in the
        buffer; and what to read before writing: head and tail are 1 where the window's first and last granule hold rows of earlier blocks,
        head where they are the same granule. At the end, the sum of the sizes, and that of heads and tails.
      base: f32[B, E, 1], the place in the buffer of the first row that the block has of an expert, in rows.
    """

    windows: jax.Array
    base: jax.Array


def count(ids: jax.Array, num_experts: int, block_tokens: int) -> jax.Array:
    """i32[B, E]: choices of each expert in each block of tokens, from ids i32[T, K]."""
    missing = -len(ids) % block_tokens
    blocks = jnp.pad(ids, ((0, missing), (0, 0)), constant_values=-1).reshape(-1, block_tokens * ids.shape[1])
    return jnp.sum(blocks[:, :, None] == jnp.arange(num_experts, dtype=ids.dtype), axis=1, dtype=jnp.int32)


def make(problem: Problem, config: Config, ids: jax.Array) -> Tables:
    """Tables of ids i32[T, K]."""
    align = problem.align
    counts = count(ids, problem.num_experts, config.block_tokens)
    assert len(counts) == num_blocks(problem, config)
    sizes = counts.sum(axis=0)
    start = jnp.cumsum(sizes) - sizes  # of each expert's rows
    earlier = jnp.cumsum(counts, axis=0) - counts  # rows of earlier blocks, of each expert
    low = start + earlier
    high = low + counts
    some = counts > 0
    first_granule, end_granule = low // align, -(-high // align)
    covered = _max_before(jnp.where(some, end_granule, 0))
    first = jnp.maximum(first_granule, covered)
    size = jnp.where(some, jnp.maximum(end_granule - first, 0), 0)
    place = jnp.cumsum(size, axis=1) - size
    # Rows of earlier blocks at the left are the expert's own, or reach into the granule from experts before it; at the right they are of
    # experts behind it.
    left = (earlier > 0) | (_max_before(jnp.where(earlier > 0, low, 0)) > first * align)
    head = (size > 0) & (first_granule >= covered) & (low % align != 0) & left
    right = _min_after(jnp.where(earlier > 0, start, jnp.int32(2**31 - 1))) < end_granule * align
    tail = (size > 0) & (high % align != 0) & right
    head, tail = head | (tail & (size == 1)), tail & (size > 1)
    windows = jnp.stack([first, size, place, head.astype(jnp.int32), tail.astype(jnp.int32)], axis=2)
    windows = jnp.pad(windows, ((0, 0), (0, padded_experts(problem) - problem.num_experts), (0, 0)))
    sums = windows.sum(axis=1)
    whole = [windows.reshape(len(counts), -1), sums[:, 1:2], sums[:, 3:4] + sums[:, 4:5]]
    windows = jnp.concatenate(whole, axis=1)[:, None, :]
    base = (low + (place - first) * align).astype(jnp.float32)[:, :, None]
    return Tables(windows.astype(jnp.int32), base)


def _max_before(values: jax.Array) -> jax.Array:
    """The largest of the values at smaller indices of axis 1; 0 for none."""
    return jnp.pad(jax.lax.cummax(values, axis=1), ((0, 0), (1, 0)))[:, :-1]


def _min_after(values: jax.Array) -> jax.Array:
    """The smallest of the values at larger indices of axis 1; the largest integer for none."""
    from_here = jax.lax.cummin(values, axis=1, reverse=True)
    return jnp.pad(from_here, ((0, 0), (0, 1)), constant_values=2**31 - 1)[:, 1:]
