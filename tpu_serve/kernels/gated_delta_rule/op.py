"""The gated delta rule on states that stay where they lie: the entry of this package.

Letters: T tokens, S sequence rows, Hk key heads and Hv value heads, Dk and Dv their sizes, C tokens of a chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.gated_delta_rule import chunk, single, tables
from tpu_serve.kernels.gated_delta_rule.problem import Config, Problem, buffers, heuristic, supported
from tpu_serve.kernels.gated_delta_rule.states import States


def problem_of(q: jax.Array, v: jax.Array, state_read: jax.Array) -> Problem:
    """Of arrays of one device, see `gated_delta_rule`."""
    num_tokens, num_key_heads, key_dim = q.shape
    _, num_value_heads, value_dim = v.shape
    dtype = jnp.dtype(v.dtype).name
    return Problem(num_tokens, len(state_read), num_key_heads, num_value_heads, key_dim, value_dim, dtype)


def gated_delta_rule(
    context: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    cu_q_lens: jax.Array,
    state_read: jax.Array,
    state_write: jax.Array,
    snapshot_write: jax.Array,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The answers of this step's tokens, and the pool with the states after them, in the same memory.

    Every row reads its state before any snapshot is written. No row reads a row of state that another one writes to, unless it is that one's
    snapshot, and no two write to the same.

    Args:
      q, k: [T, Hk, Dk] in v's type, neither normalised nor scaled. Value heads that lie side by side share a key head, Hv / Hk each.
      v: [T, Hv, Dv], bfloat16 or float32.
      log_decay: f32[T, Hv], at most 0. beta: f32[T, Hv].
      pool: f32[rows of state, Hv, Dk, Dv].
      cu_q_lens: i32[S + 1], where each row's tokens start, from 0 on. Tokens behind the last row's are padding and may hold anything.
      state_read: i32[S], row of state that each row with tokens starts from, -1 for zeros.
      state_write, snapshot_write: i32[S], the rows of state that take its state afterwards; out of range for none. Where there is nothing to
        write there is no snapshot.

    Returns:
      [T, Hv, Dv] of v's type, 0 at padding; the pool.

    Raises:
      ValueError: see `problem.supported`.
    """
    problem = problem_of(q, v, state_read)
    if (reason := supported(problem, context.chip)) is not None:
        raise ValueError(reason)
    p, config = problem, config or heuristic(problem)
    made = tables.make(p, config, cu_q_lens, snapshot_write, len(pool))
    num_blocks = p.num_key_heads // config.key_heads
    heads = config.key_heads * p.group
    widths = config.key_heads * p.key_dim, config.key_heads * p.key_dim, heads * p.value_dim
    flat = [part.reshape(p.num_tokens, -1) for part in (q, k, v)]
    gates = [part.reshape(p.num_tokens, num_blocks, heads).swapaxes(0, 1) for part in (log_decay, beta)]

    def item(step: Any) -> Any:
        return jnp.maximum(step - 1, 0)

    def in_front(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((p.num_single, width), lambda block, step, *_: (0, block))

    def in_chunk(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (config.chunk, width), lambda block, step, counts, row, chunk, *_: (chunk[item(step)], block)
        )

    gate_in_front = pl.BlockSpec((None, p.num_single, heads), lambda block, step, *_: (block, 0, 0))
    gate_in_chunk = pl.BlockSpec(
        (None, config.chunk, heads), lambda block, step, counts, row, chunk, *_: (block, chunk[item(step)], 0)
    )
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    prefetched = [made.counts, made.row, made.chunk, made.starts, state_read, state_write, snapshot_write]
    operands = [*flat, *gates, *flat, *gates, pool]
    in_vmem = {name: pltpu.VMEM(shape, jnp.dtype(dtype)) for name, (shape, dtype) in buffers(p, config).items()}
    semaphores = {
        "arrived": pltpu.SemaphoreType.DMA((config.slots,)),
        "left": pltpu.SemaphoreType.DMA((config.slots,)),
        "copied": pltpu.SemaphoreType.DMA(()),
    }
    value_width = p.num_value_heads * p.value_dim
    alone, chunked, pool = pl.pallas_call(
        functools.partial(_kernel, problem=p, config=config),
        out_shape=(
            jax.ShapeDtypeStruct((p.num_single, value_width), jnp.float32),
            jax.ShapeDtypeStruct((p.num_tokens, value_width), v.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(num_blocks, made.counts[1] + 1),
            in_specs=[
                *map(in_front, widths), gate_in_front, gate_in_front,
                *map(in_chunk, widths), gate_in_chunk, gate_in_chunk,
                in_hbm,
            ],
            out_specs=(in_front(widths[2]), in_chunk(widths[2]), in_hbm),
            scratch_shapes=(in_vmem | semaphores | {"turn": pltpu.SMEM((1 + config.slots,), jnp.int32)},),
        ),
        input_output_aliases={len(prefetched) + len(operands) - 1: 2},
        compiler_params=context.compiler_params(),
        interpret=context.interpret,
        name="gated_delta_rule",
    )(*prefetched, *operands)  # fmt: skip

    token = jnp.arange(p.num_tokens, dtype=jnp.int32)[:, None]
    padded = jnp.pad(alone.astype(v.dtype), ((0, p.num_tokens - p.num_single), (0, 0)))
    out = jnp.where(token < made.counts[0], padded, jnp.where(token < cu_q_lens[-1], chunked, jnp.zeros((), v.dtype)))
    return out.reshape(v.shape), pool


def _kernel(
    counts: Any, row_of: Any, chunk_of: Any, starts: Any, read: Any, write: Any, snapshot: Any,
    *refs: Any, problem: Problem, config: Config,
) -> None:  # fmt: skip
    in_front, in_chunk, (_, alone, chunked, pool, scratch) = refs[:5], refs[5:10], refs[10:]
    block, step = pl.program_id(0), pl.program_id(1)
    num_heads = config.key_heads * problem.group
    heads = pl.ds(block * num_heads, num_heads)
    states = States(
        pool, scratch["states"], scratch["arrived"], scratch["left"], scratch["copied"], heads, read, write, snapshot
    )
    num_leading, num_items, num_snapshots = counts[0], counts[1], counts[2]

    @pl.when(step == 0)
    def _first() -> None:
        single.run(problem, config, num_leading, states, in_front, alone, scratch)
        scratch["turn"][0] = 0
        pl.when(num_items > 0)(lambda: states.load(row_of[0], 0))

    pl.when(step > 0)(lambda: _item(problem, config, step - 1, num_items, (row_of, chunk_of, starts), states,
                                    in_chunk, chunked, scratch["turn"]))  # fmt: skip

    @pl.when(step == num_items)
    def _last() -> None:
        turn = scratch["turn"]

        def drain(index: Any, _: None) -> None:
            slot = jax.lax.rem(index, config.slots)
            states.wait_stored(turn[1 + slot], slot)

        jax.lax.fori_loop(jnp.maximum(turn[0] - config.slots, 0), turn[0], drain, None)
        jax.lax.fori_loop(0, num_snapshots, lambda row, _: states.start_snapshot(row), None)
        jax.lax.fori_loop(0, num_snapshots, lambda row, _: states.wait_snapshot(row), None)


def _item(
    problem: Problem, config: Config, item: Any, num_items: Any, where: Any, states: States,
    refs: Any, out: Any, turn: Any,
) -> None:  # fmt: skip
    """One piece of a chunk, with the state of its row in a slot that rows take in turn.

    Args:
      turn: in SMEM, how many rows have had theirs, and the last row of each slot.
    """
    row_of, chunk_of, starts = where
    row, begin = row_of[item], chunk_of[item] * config.chunk
    start, end = starts[row], starts[row + 1]
    is_first, is_last = start >= begin, end <= begin + config.chunk
    slot = jax.lax.rem(turn[0], config.slots)
    following = item + jax.lax.div(end - 1, config.chunk) - jax.lax.div(start, config.chunk) + 1

    @pl.when(is_first & (following < num_items))
    def _load() -> None:
        coming = jax.lax.rem(turn[0] + 1, config.slots)
        pl.when(turn[0] + 1 >= config.slots)(lambda: states.wait_stored(turn[1 + coming], coming))
        states.load(row_of[following], coming)

    pl.when(is_first)(lambda: states.wait_loaded(row, slot))
    keep = (item > 0) & (chunk_of[jnp.maximum(item - 1, 0)] == chunk_of[item])
    tokens = chunk.Tokens(*refs)
    chunk.advance(
        problem, config, tokens, jnp.maximum(start - begin, 0), jnp.minimum(end - begin, config.chunk),
        states.held(slot), out, keep,
    )  # fmt: skip

    @pl.when(is_last)
    def _store() -> None:
        states.store(row, slot)
        turn[1 + slot] = row
        turn[0] = turn[0] + 1
