"""The convolution on the last inputs of all sequences."""

from __future__ import annotations

import jax

from tpu_serve.device.batch import Batch
from tpu_serve.layers.convolution import convolve
from tpu_serve.layers.state_pool import read_rows, write_rows


def update_tails(x: jax.Array, weight: jax.Array, pool: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """`convolve` for the rows of a batch, and the pool with their last inputs after this step.

    A row of the pool is flat, and one head's inputs lie together. Flat rows are what a TPU gathers and scatters fast: with an axis of W - 1
    in front of the last one, XLA's scatter takes ten times as long.

    Args:
      x: [T, heads * D].
      weight: [heads, D, W].
      pool: [rows, heads * (W - 1) * D] of x's type.
    """
    num_heads, size, num_taps = weight.shape
    reach = num_taps - 1
    rows = read_rows(pool, batch)
    tails = rows.reshape(len(rows), num_heads, reach, size).swapaxes(1, 2).reshape(len(rows), reach, -1)
    out, tails = convolve(x, weight.reshape(-1, num_taps), tails, batch.seq_of_token, batch.cu_q_lens)
    rows = tails.reshape(len(rows), reach, num_heads, size).swapaxes(1, 2).reshape(rows.shape)
    return out, write_rows(pool, rows, batch)
