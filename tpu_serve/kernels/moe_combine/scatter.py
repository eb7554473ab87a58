"""The scatter direction: the matrix unit puts a block's tokens, weighted, where their rows lie in the buffer, and windows carry those out.

`permute` forward, with all weights one, and the gradient of `combine`'s rows. Blocks run in order. A granule at the end of a window may hold rows of
other blocks: those of earlier ones are read back before it is written, those of later ones are written by them. Letters as in `problem.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import gather, selection, tables
from tpu_serve.kernels.moe_combine.problem import (
    CHUNK,
    LANES,
    SUBLANES,
    Config,
    Problem,
    num_blocks,
    num_panels,
    table_width,
)
from tpu_serve.kernels.moe_combine.windows import Windows

F32 = jnp.float32
STRIP = selection.STRIP


def _kernel(
    total: Any, before: Any, table: Any, after: Any, base: Any, ids: Any, weights: Any, tokens: Any, rows: Any,
    scratch: dict[str, Any], *, problem: Problem, config: Config, zero_rest: bool,
) -> None:  # fmt: skip
    p = problem
    block, panel = pl.program_id(0), pl.program_id(1)
    blocks, panels = num_blocks(p, config), num_panels(p, config)
    step, last = block * panels + panel, blocks * panels - 1
    slot = jax.lax.rem(step, 2)
    slots, written, staged = scratch["rows"], scratch["arrived"], scratch["staged"]
    here = Windows(p, config, table, panel)
    chunks = jax.lax.div(here.used * p.align + CHUNK - 1, CHUNK)

    @pl.when(step == 0)
    def _() -> None:
        slots[...] = jnp.zeros_like(slots)

    @pl.when(panel == 0)
    def _() -> None:
        _select(problem, ids, base, weights, chunks, scratch)

    # The first block has no earlier ones, and its tables say so.
    here.wait_staged(slots.at[slot], staged.at[slot])
    _place(problem, config, tokens, slots.at[slot], chunks, scratch)
    here.write(slots.at[slot], rows, written.at[slot])

    def wait_written(of: Any, of_panel: Any, to: Any) -> None:
        Windows(p, config, of, of_panel).wait(slots.at[to], written.at[to])

    def stage(of: Any, of_panel: Any) -> None:
        Windows(p, config, of, of_panel).stage(rows, slots.at[1 - slot], staged.at[1 - slot])

    # What the next step stages was written by the block before, one step ago at the latest: with a single panel by this very step.
    if panels == 1:
        wait_written(table, panel, slot)
    else:
        pl.when((step > 0) & (panel > 0))(lambda: wait_written(table, panel - 1, 1 - slot))
        pl.when((step > 0) & (panel == 0))(lambda: wait_written(before, panels - 1, 1 - slot))
        pl.when(panel + 1 < panels)(lambda: stage(table, panel + 1))
        pl.when(step == last)(lambda: wait_written(table, panel, slot))
    pl.when((panel + 1 == panels) & (step < last))(lambda: stage(after, 0))
    if zero_rest:
        pl.when(step == last)(lambda: _zero_rest(problem, total[0], rows, scratch))


def _zero_rest(problem: Problem, total: Any, rows: Any, scratch: dict[str, Any]) -> None:
    """Zero in the rows from `total` on, when everything else has been written."""
    granule, semaphore = scratch["granule"], scratch["staged"].at[0]
    align, end = problem.align, problem.num_rows // problem.align
    shared = jax.lax.div(total, align)

    def copy(index: Any, outward: bool) -> Any:
        there = rows.at[pl.ds(pl.multiple_of(index * align, align), align)]
        return pltpu.make_async_copy(*((granule, there) if outward else (there, granule)), semaphore)

    @pl.when(jax.lax.rem(total, align) > 0)
    def _() -> None:
        copy(shared, False).start()
        copy(shared, False).wait()
        row = jax.lax.broadcasted_iota(jnp.int32, granule.shape, 0) + shared * align
        kept = jnp.where(row < total, granule[...].astype(F32), 0.0)
        granule[...] = _narrow(kept, granule.dtype)
        copy(shared, True).start()
        copy(shared, True).wait()

    first = jax.lax.div(total + align - 1, align)

    @pl.when(first < end)
    def _() -> None:
        granule[...] = jnp.zeros_like(granule)
        jax.lax.fori_loop(first, end, lambda index, _: copy(index, True).start(), None)
        jax.lax.fori_loop(first, end, lambda index, _: copy(index, True).wait(), None)


def _select(problem: Problem, ids: Any, base: Any, weights: Any, chunks: Any, scratch: dict[str, Any]) -> None:
    """The block's matrices, and which rows of its buffer are its own."""
    spread, tokens = scratch["spread"], ids.shape[1]
    of_choice = [selection.places(ids[...], base[0]), *([] if weights is None else [weights[...].astype(F32)])]
    for index, values in enumerate(of_choice):
        for choice in range(problem.top_k):
            spread[index, choice] = jnp.broadcast_to(values[choice : choice + 1], (SUBLANES, tokens))

    def build(index: Any, _: None) -> None:
        # Two strips at a time: choosing is one dependence from choice to choice.
        for strip in range(2):
            first = (index * 2 + strip) * STRIP
            chunk = jax.lax.div(first, CHUNK)
            of = pl.ds(pl.multiple_of(first - chunk * CHUNK, STRIP), STRIP)
            ones = selection.rows_by_token(spread, False, first)
            matrix = ones if weights is None else selection.rows_by_token(spread, True, first)
            for part, values in enumerate(selection.parts(problem, matrix)):
                scratch["selected"][chunk, of, pl.ds(part * tokens, tokens)] = values
            groups = [ones[:, lane : lane + LANES] for lane in range(0, tokens, LANES)]
            scratch["own"][chunk, of] = functools.reduce(jnp.maximum, groups)

    def spread_own(chunk: Any, _: None) -> None:
        # Across lanes for many rows at once: a single one would wait for the result.
        any_token = jnp.max(scratch["own"][chunk], axis=1, keepdims=True)
        scratch["own"][chunk] = jnp.broadcast_to(any_token, (CHUNK, LANES))

    jax.lax.fori_loop(0, chunks * (CHUNK // STRIP // 2), build, None)
    jax.lax.fori_loop(0, chunks, spread_own, None)


def _place(problem: Problem, config: Config, tokens: Any, buffer: Any, chunks: Any, scratch: dict[str, Any]) -> None:
    """The block's tokens into its rows of the buffer; the others keep what was staged there."""
    selected, own = scratch["selected"], scratch["own"]
    token = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 0) + pl.program_id(0) * config.block_tokens
    values = jnp.where(token < problem.num_tokens, tokens[...].astype(F32), 0.0)
    if problem.hidden % config.panel:
        column = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1) + pl.program_id(1) * config.panel
        values = jnp.where(column < problem.hidden, values, 0.0)
    finite = selection.is_finite(values)
    dtype = selected.dtype
    clean = jnp.where(finite, values, 0.0).astype(dtype)

    def put(chunk: Any, result: jax.Array) -> None:
        where = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
        old = buffer[where].astype(F32)
        mixed = jnp.where(selection.across(own[chunk], config.panel) > 0.0, result, old)
        buffer[where] = _narrow(mixed, buffer.dtype)

    def product(chunk: Any) -> jax.Array:
        """One product for all parts: they lie side by side, and the tokens below each other as often."""
        return selection.multiply(selected[chunk], jnp.concatenate([clean] * problem.num_parts))

    spoilt = jnp.max(jnp.where(finite, 0.0, 1.0)) > 0

    @pl.when(jnp.logical_not(spoilt))
    def _() -> None:
        jax.lax.fori_loop(0, chunks, lambda chunk, _: put(chunk, product(chunk)), None)

    # 0 times infinity is NaN: what is not finite goes by itself, as a sign to put it back by.
    @pl.when(spoilt)
    def _() -> None:
        marks = [values != values, values == jnp.inf, values == -jnp.inf]
        marks = [jnp.where(mark, 1.0, 0.0).astype(dtype) for mark in marks]

        def one(chunk: Any, _: None) -> None:
            result = product(chunk)
            weight = selected[chunk][:, : config.block_tokens].astype(F32)
            has = jnp.where(weight != 0.0, 1.0, 0.0).astype(dtype)
            minus = jnp.where(weight < 0.0, 1.0, 0.0).astype(dtype)
            plus = jnp.where(weight > 0.0, 1.0, 0.0).astype(dtype)
            nan, high, low = marks
            up = selection.multiply(plus, high) + selection.multiply(minus, low)
            down = selection.multiply(plus, low) + selection.multiply(minus, high)
            result = jnp.where(up > 0.0, jnp.inf, jnp.where(down > 0.0, -jnp.inf, result))
            put(chunk, jnp.where(selection.multiply(has, nan) > 0.0, jnp.nan, result))

        jax.lax.fori_loop(0, chunks, one, None)


def _narrow(values: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return values.astype(jnp.int32).astype(dtype)
    return values.astype(dtype)


def scattered(
    problem: Problem, config: Config, context: Context, tokens: jax.Array, ids: jax.Array, weights: jax.Array | None,
    *, zero_rest: bool = False,
) -> jax.Array:  # fmt: skip
    """rows[row of choice (t, k)] = weights[t, k] * tokens[t], one product rounded once; 0 where the weight is 0, whatever the token.

    Args:
      tokens: [T, H] in the problem's dtype.
      ids: i32[T, K]; weights: [T, K], or None for ones.
      zero_rest: write zeros to the rows behind the last choice's, which hold anything otherwise.

    Returns:
      [R, H] in the type of the tokens.
    """
    p, blocks = problem, num_blocks(problem, config)
    table = tables.make(p, config, ids)
    width = table_width(p)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)

    def of_block(distance: int) -> pl.BlockSpec:
        index = lambda block, panel: (jnp.clip(block + distance, 0, blocks - 1), 0, 0)  # noqa: E731
        return pl.BlockSpec((1, 1, width), index, memory_space=pltpu.SMEM)

    scratch = gather.scratch_of(p, config, "permute") | {"staged": pltpu.SemaphoreType.DMA((2,))}
    return pl.pallas_call(
        functools.partial(_kernel, problem=p, config=config, zero_rest=zero_rest),
        out_shape=jax.ShapeDtypeStruct((p.num_rows, p.hidden), tokens.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(blocks, num_panels(p, config)),
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                of_block(-1),
                of_block(0),
                of_block(1),
                pl.BlockSpec((1, p.num_experts, 1), lambda block, panel: (block, 0, 0)),
                gather.by_choice(p, config),
                None if weights is None else gather.by_choice(p, config),
                gather.by_token(config),
            ],
            out_specs=in_hbm,
            scratch_shapes=(scratch,),
        ),
        compiler_params=context.compiler_params(),
        interpret=context.interpret,
        name="moe_combine_scatter",
    )(
        jnp.sum(ids >= 0, dtype=jnp.int32, keepdims=True).reshape(1),
        table.windows,
        table.windows,
        table.windows,
        table.base,
        gather.transposed(ids, config.block_tokens, -1),
        None if weights is None else gather.transposed(weights, config.block_tokens, 0),
        tokens,
    )
