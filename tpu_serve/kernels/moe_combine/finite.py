"""A block's sums once more where some row is not finite: 0 times infinity is NaN, and would spoil the sums of every token of the block.

Letters as in `problem.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpu_serve.kernels.moe_combine import selection
from tpu_serve.kernels.moe_combine.problem import CHUNK, Config, Problem, slice_columns

F32 = jnp.float32
STRIP = selection.STRIP


def sum_finite(problem: Problem, config: Config, buffer: Any, chunks: Any, out: Any, scratch: dict[str, Any]) -> None:
    """The sums once more, NaN only where a token's own row is not finite. Rarely run, so in slices and loops, which compile sooner than they run."""
    selected, total = scratch["selected"], scratch["total"]
    tokens, width = config.block_tokens, slice_columns(config)

    def for_slices(body: Any) -> None:
        def one(index: Any, _: None) -> None:
            body(pl.ds(pl.multiple_of(index * width, width), width))

        jax.lax.fori_loop(0, config.panel // width, one, None)

    def clear(columns: Any) -> None:
        total[:, columns] = jnp.zeros((tokens, width), F32)

    def add(chunk: Any, _: None) -> None:
        rows = _flat_chunk(problem, buffer, chunk, scratch)

        def add_slice(columns: Any) -> None:
            values = rows[:, columns].astype(F32)
            finite = selection.is_finite(values)
            cleaned = jnp.where(finite, values, 0.0).astype(selected.dtype)
            total[:, columns] += halves(problem, selection.multiply(selected[chunk], cleaned))
            picks = jnp.where(selected[chunk, pl.ds(0, tokens)].astype(F32) != 0.0, 1.0, 0.0).astype(selected.dtype)
            spoilt = selection.multiply(picks, jnp.where(finite, 0.0, 1.0).astype(selected.dtype))
            total[:, columns] = jnp.where(spoilt > 0.0, jnp.nan, total[:, columns])

        for_slices(add_slice)

    def store(columns: Any) -> None:
        out[:, columns] = total[:, columns].astype(out.dtype)

    for_slices(clear)
    jax.lax.fori_loop(0, chunks, add, None)
    for_slices(store)


def _flat_chunk(problem: Problem, buffer: Any, chunk: Any, scratch: dict[str, Any]) -> Any:
    """Reference to [CHUNK, P] rows of the buffer, from which columns can be taken."""
    if problem.align > 1:
        return buffer.at[pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)]
    flat = scratch["flat"]

    def strip(index: Any, _: None) -> None:
        of = pl.ds(pl.multiple_of(index * STRIP, STRIP), STRIP)
        rows = buffer[pl.ds(pl.multiple_of(chunk * CHUNK + index * STRIP, STRIP), STRIP)]
        flat[of] = rows.reshape(STRIP, -1)[:, : problem.hidden]

    jax.lax.fori_loop(0, CHUNK // STRIP, strip, None)
    return flat


def halves(problem: Problem, product: jax.Array) -> jax.Array:
    """The sum over the parts that lie below each other."""
    if problem.num_parts == 1:
        return product
    tokens = len(product) // 2
    return product[:tokens] + product[tokens:]
