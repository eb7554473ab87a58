"""Which piece of which chunk belongs to which row: small tables in plain JAX, the same for all layers of a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tpu_serve.kernels.gated_delta_rule.problem import Config, Problem, num_items


class Tables(NamedTuple):
    """Attributes:
    counts: i32[3]: leading rows with a single token, which is row i's token i; items; rows up to the last that keeps a snapshot.
    row, chunk: i32[items], of each item. Items of a row lie together, in the order of its tokens; those behind the last are like it.
    starts: i32[S + 1], where each row's tokens start.
    """

    counts: jax.Array
    row: jax.Array
    chunk: jax.Array
    starts: jax.Array


def num_leading(cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """i32[]: how many rows in front have a single token each."""
    alone = jnp.diff(cu_q_lens)[:num_tokens] == 1
    return jnp.sum(jnp.cumprod(alone.astype(jnp.int32)), dtype=jnp.int32)


def make(
    problem: Problem, config: Config, cu_q_lens: jax.Array, snapshot_write: jax.Array, num_state_rows: int
) -> Tables:
    """Tables of a step.

    Args:
      cu_q_lens: i32[S + 1].
      snapshot_write: i32[S], out of range where there is none.
    """
    rows, count = jnp.arange(problem.num_rows, dtype=jnp.int32), num_items(problem, config)
    leading = num_leading(cu_q_lens, problem.num_tokens)
    start, end = cu_q_lens[:-1], cu_q_lens[1:]
    first = jax.lax.div(start, config.chunk)
    touched = jax.lax.div(end - 1, config.chunk) - first + 1
    touched = jnp.where((rows >= leading) & (end > start), touched, 0)
    stop = jnp.cumsum(touched, dtype=jnp.int32)
    item = jnp.minimum(jnp.arange(count, dtype=jnp.int32), jnp.maximum(stop[-1] - 1, 0))
    # Sums over all rows instead of gathers, which take their time element by element.
    row = jnp.minimum(jnp.sum(stop <= item[:, None], axis=1, dtype=jnp.int32), problem.num_rows - 1)
    offset = jnp.sum(jnp.where(rows == row[:, None], first - (stop - touched), 0), axis=1, dtype=jnp.int32)
    last_chunk = jax.lax.div(jnp.int32(problem.num_tokens - 1), jnp.int32(config.chunk))
    chunk = jnp.clip(item + offset, 0, last_chunk)
    keeps = (snapshot_write >= 0) & (snapshot_write < num_state_rows) & (end > start)
    num_snapshots = jnp.max(jnp.where(keeps, rows + 1, 0))
    counts = jnp.stack([leading, stop[-1], num_snapshots])
    return Tables(counts, row, chunk, cu_q_lens.astype(jnp.int32))
