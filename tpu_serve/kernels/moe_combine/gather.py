"""The gather direction: a block's rows come in through its windows, and the matrix unit picks, weights and adds them.

Two things are made of them: sums of a token's rows (`combine` forward, `permute` backward), and products of a token with its rows (the gradient
of `combine`'s weights). Letters as in `problem.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import selection, tables
from tpu_serve.kernels.moe_combine.finite import halves, sum_finite
from tpu_serve.kernels.moe_combine.problem import (
    CHUNK,
    LANES,
    Config,
    Operation,
    Problem,
    buffers,
    num_blocks,
    num_panels,
    table_width,
)
from tpu_serve.kernels.moe_combine.windows import Windows

F32 = jnp.float32
STRIP = selection.STRIP


def _gather(
    problem: Problem, config: Config, table: Any, next_table: Any, rows: Any, scratch: dict[str, Any]
) -> tuple[Any, Any]:
    """Brings this step's rows in and starts the next step's.

    Returns:
      the buffer [J, P], or [J, H / 128, 128], and the number of its chunks in use.
    """
    block, panel = pl.program_id(0), pl.program_id(1)
    panels, blocks = num_panels(problem, config), num_blocks(problem, config)
    slot = jax.lax.rem(block * panels + panel, 2)
    slots, arrived = scratch["rows"], scratch["arrived"]

    def start(of: Any, of_panel: Any, to: Any) -> None:
        Windows(problem, config, of, of_panel).read(rows, slots.at[to], arrived.at[to])

    @pl.when((block == 0) & (panel == 0))
    def _() -> None:
        # Rows that no window fills are multiplied by zero, which must not make NaN of them.
        def clear(index: Any, _: None) -> None:
            of = pl.ds(pl.multiple_of(jax.lax.rem(index, strips) * STRIP, STRIP), STRIP)
            slots[jax.lax.div(index, strips), of] = jnp.zeros((STRIP, *slots.shape[2:]), slots.dtype)

        strips = slots.shape[1] // STRIP
        jax.lax.fori_loop(0, 2 * strips, clear, None)
        start(table, panel, slot)

    if panels > 1:
        pl.when(panel + 1 < panels)(lambda: start(table, panel + 1, 1 - slot))
    pl.when((panel + 1 == panels) & (block + 1 < blocks))(lambda: start(next_table, 0, 1 - slot))
    here = Windows(problem, config, table, panel)
    here.wait(slots.at[slot], arrived.at[slot])
    return slots.at[slot], jax.lax.div(here.used * problem.align + CHUNK - 1, CHUNK)


def _chunk(problem: Problem, buffer: Any, chunk: Any) -> jax.Array:
    """[CHUNK, P] rows of the buffer."""
    values = buffer[pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)]
    return values if values.ndim == 2 else values.reshape(CHUNK, -1)[:, : problem.hidden]


def _existing(problem: Problem, config: Config, values: jax.Array) -> jax.Array:
    """Zero in the columns beyond the last, of which blocks and buffers of a narrower last panel hold anything."""
    if problem.hidden % config.panel == 0:
        return values
    left = problem.hidden - pl.program_id(1) * config.panel
    column = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.where(column < left, values.astype(F32), 0.0).astype(values.dtype)


def _sum_kernel(
    table: Any, next_table: Any, base: Any, ids: Any, weights: Any, rows: Any, out: Any, scratch: dict[str, Any],
    *, problem: Problem, config: Config,
) -> None:  # fmt: skip
    buffer, chunks = _gather(problem, config, table, next_table, rows, scratch)
    selected, total = scratch["selected"], scratch["total"]
    tokens = config.block_tokens

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        spread = scratch["spread"]
        of_choice = [selection.places(ids[...], base[0]), *([] if weights is None else [weights[...].astype(F32)])]
        for index, values in enumerate(of_choice):
            by_token = jnp.transpose(values)
            for choice in range(problem.top_k):
                column = by_token[:, choice : choice + 1]
                spread[index, choice] = jnp.broadcast_to(column, (tokens, LANES))

        def build(index: Any, _: None) -> None:
            chunk, strip = jax.lax.div(index, tokens // STRIP), jax.lax.rem(index, tokens // STRIP)
            of = pl.ds(pl.multiple_of(strip * STRIP, STRIP), STRIP)
            matrix = selection.token_by_rows(spread.at[:, :, of], chunk * CHUNK)
            for part, values in enumerate(selection.parts(problem, matrix)):
                first = pl.multiple_of(part * tokens + strip * STRIP, STRIP)
                selected[chunk, pl.ds(first, STRIP)] = values

        jax.lax.fori_loop(0, chunks * (tokens // STRIP), build, None)

    def add(chunk: Any, _: None) -> None:
        total[...] += halves(problem, selection.multiply(selected[chunk], _chunk(problem, buffer, chunk)))

    total[...] = jnp.zeros_like(total)
    jax.lax.fori_loop(0, chunks, add, None)
    result = total[...]
    out[...] = result.astype(out.dtype)

    # 0 times infinity is NaN: one row that is not finite spoils the sums of all tokens of the block. Only then is it worth a second look.
    @pl.when(jnp.max(jnp.where(selection.is_finite(_existing(problem, config, result)), 0.0, 1.0)) > 0)
    def _() -> None:
        sum_finite(problem, config, buffer, chunks, out, scratch)


def _dots_kernel(
    table: Any, next_table: Any, base: Any, ids: Any, tokens: Any, rows: Any, out: Any, scratch: dict[str, Any],
    *, problem: Problem, config: Config,
) -> None:  # fmt: skip
    buffer, chunks = _gather(problem, config, table, next_table, rows, scratch)
    dots = scratch["dots"]
    own = _existing(problem, config, tokens[...])

    def add(chunk: Any, _: None) -> None:
        values = _existing(problem, config, _chunk(problem, buffer, chunk))
        found = selection.multiply(values, own, contract=(1, 1))
        dots[chunk] = jnp.where(pl.program_id(1) == 0, found, dots[chunk] + found)

    jax.lax.fori_loop(0, chunks, add, None)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _() -> None:
        place = selection.places(ids[...], base[0])

        def pick(chunk: Any, total: jax.Array) -> jax.Array:
            row = jax.lax.broadcasted_iota(jnp.int32, dots.shape[1:], 0).astype(F32) + (chunk * CHUNK).astype(F32)
            found = [
                jnp.sum(jnp.where(place[one : one + 1] == row, dots[chunk], 0.0), axis=0, keepdims=True)
                for one in range(len(place))
            ]
            return total + jnp.concatenate(found)

        out[...] = jax.lax.fori_loop(0, chunks, pick, jnp.zeros(place.shape, F32))


def _specs(problem: Problem, config: Config) -> list[pl.BlockSpec]:
    """Of this block's table and the next one's, of the bases and of the ids."""
    last = num_blocks(problem, config) - 1
    width = table_width(problem)
    return [
        pl.BlockSpec((1, 1, width), lambda block, panel: (block, 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec((1, 1, width), lambda block, panel: (jnp.minimum(block + 1, last), 0, 0), memory_space=pltpu.SMEM),
        pl.BlockSpec((1, problem.num_experts, 1), lambda block, panel: (block, 0, 0)),
        by_choice(problem, config),
    ]


def by_choice(problem: Problem, config: Config) -> pl.BlockSpec:
    """Of an array [K, T]."""
    return pl.BlockSpec((problem.top_k, config.block_tokens), lambda block, panel: (0, block))


def by_token(config: Config) -> pl.BlockSpec:
    """Of an array [T, H]."""
    return pl.BlockSpec((config.block_tokens, config.panel), lambda block, panel: (block, panel))


def transposed(array: jax.Array, multiple: int, fill: Any) -> jax.Array:
    """[T, K] as [K, T], T filled up to a multiple."""
    return jnp.pad(array.T, ((0, 0), (0, -len(array) % multiple)), constant_values=fill)


def scratch_of(problem: Problem, config: Config, operation: Operation) -> dict[str, Any]:
    """Pallas scratch of a kernel: its buffers, and a semaphore for each slot of rows."""
    held = buffers(problem, config, operation)
    in_vmem = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in held.items()}
    return in_vmem | {"arrived": pltpu.SemaphoreType.DMA((2,))}


def sums(
    problem: Problem, config: Config, context: Context, rows: jax.Array, ids: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """y[t] = sum over k of weights[t, k] * rows[row of choice (t, k)], added in float32.

    A row that is not finite makes NaN of the columns that it is not finite in, in the tokens that have it with a weight other than zero.

    Args:
      rows: [R, H] in the problem's dtype, or [R, L, 128] where its `align` is 1.
      ids: i32[T, K]; weights: [T, K], or None for ones.

    Returns:
      [T, H] in the problem's out type.
    """
    p, blocks = problem, num_blocks(problem, config)
    table = tables.make(p, config, ids)
    tokens = config.block_tokens
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    scratch = scratch_of(p, config, "combine")
    return pl.pallas_call(
        functools.partial(_sum_kernel, problem=p, config=config),
        out_shape=jax.ShapeDtypeStruct((p.num_tokens, p.hidden), jnp.dtype(p.out_type)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(blocks, num_panels(p, config)),
            in_specs=[*_specs(p, config), None if weights is None else by_choice(p, config), in_hbm],
            out_specs=by_token(config),
            scratch_shapes=(scratch,),
        ),
        compiler_params=context.compiler_params(),
        interpret=context.interpret,
        name="moe_combine_gather",
    )(
        table.windows,
        table.windows,
        table.base,
        transposed(ids, tokens, -1),
        None if weights is None else transposed(weights, tokens, 0),
        rows,
    )


def dots(
    problem: Problem, config: Config, context: Context, rows: jax.Array, ids: jax.Array, tokens: jax.Array
) -> jax.Array:
    """f32[T, K]: the product of token t with the row of its choice k, 0 where that names no expert.

    Args:
      rows: [R, H]; ids: i32[T, K]; tokens: [T, H] in the type of the rows.
    """
    p, blocks = problem, num_blocks(problem, config)
    table = tables.make(p, config, ids)
    scratch = scratch_of(p, config, "dots")
    found = pl.pallas_call(
        functools.partial(_dots_kernel, problem=p, config=config),
        out_shape=jax.ShapeDtypeStruct((p.top_k, blocks * config.block_tokens), F32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(blocks, num_panels(p, config)),
            in_specs=[*_specs(p, config), by_token(config), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=by_choice(p, config),
            scratch_shapes=(scratch,),
        ),
        compiler_params=context.compiler_params(),
        interpret=context.interpret,
        name="moe_combine_dots",
    )(
        table.windows,
        table.windows,
        table.base,
        transposed(ids, config.block_tokens, -1),
        tokens,
        rows,
    )
    return found.T[: p.num_tokens]
