"""Rows of recurrent state: where a step's sequences start from and where they leave what they have become."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import Batch


def read_rows(pool: jax.Array, batch: Batch) -> jax.Array:
    """What each sequence row starts from, [S, ...]."""
    rows = batch.state_read
    started = (rows >= 0).reshape(-1, *[1] * (pool.ndim - 1))
    return jnp.where(started, pool[jnp.maximum(rows, 0)], jnp.zeros((), pool.dtype))


def write_rows(pool: jax.Array, rows: jax.Array, batch: Batch) -> jax.Array:
    """The pool with what each sequence row has become, [S, ...], and with the snapshots of it."""
    rows = rows.astype(pool.dtype)
    for target in (batch.state_write, batch.snapshot_write):
        pool = pool.at[target].set(rows, mode="drop")
    return pool
