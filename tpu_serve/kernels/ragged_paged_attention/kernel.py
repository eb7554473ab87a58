"""The kernel: three phases over one cache, in one call; README.md has the overview."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.ragged_paged_attention.config import TABLE_RING, WRITE_RING, Config, tables_stay
from tpu_serve.kernels.ragged_paged_attention.decode import Decode, decode_scratch
from tpu_serve.kernels.ragged_paged_attention.prefill import Prefill, prefill_scratch
from tpu_serve.kernels.ragged_paged_attention.problem import TABLE_CHUNK, Problem
from tpu_serve.kernels.ragged_paged_attention.softmax import ZERO_ROWS, Softmax
from tpu_serve.kernels.ragged_paged_attention.stream import Stream
from tpu_serve.kernels.ragged_paged_attention.tables import Tables
from tpu_serve.kernels.ragged_paged_attention.walk import Walk
from tpu_serve.kernels.ragged_paged_attention.write import Writer, write_scratch
from tpu_serve.kernels.ragged_paged_attention.write_decode import TokenWriter, write_decode_scratch


class Operands(NamedTuple):
    """What the kernel takes, in the order in which it takes it; None where the problem has no such thing.

    Attributes:
      starts: i32[S + 1], where each sequence's tokens begin in T.
      lengths: i32[S], tokens of each sequence after this step.
      index: i32[T], where each token goes in the cache.
      counts: i32[2], tokens that are alone in their sequence, which come first, and all tokens.
      tables: i32[S * C, 1, 128], C pieces of 128 pages for each sequence; in scalar memory where `config.tables_stay`.
      decode_queries: [D, K, rows of a decode, query lanes] of the first D tokens, those behind a group's heads being zero.
      queries: [T', N * query lanes], T' being whole tiles.
      decode_new: f32[D * K, L], the first D tokens' keys and values side by side.
      decode_scales: f32[D, K, 2, segment], theirs, in all lanes.
      new: [K, T', L], this step's keys and values side by side, T' being whole granules.
      new_scales: f32[K, 2, T'], those of keys and values; T' is whole segments and one more.
      sinks: f32[K, rows of a decode, 128].
      pages: [pages, K, page size, L].
      scales: f32[pages, K, 2, page size].
    """

    starts: Any
    lengths: Any
    index: Any
    counts: Any
    tables: Any
    decode_queries: Any
    queries: Any
    decode_new: Any
    decode_scales: Any
    new: Any
    new_scales: Any
    sinks: Any
    pages: Any
    scales: Any


NUM_SCALARS = 4
"""Operands that are always in scalar memory."""


def _tables(problem: Problem, given: Operands, scratch: dict[str, Any], walk: Callable[..., Walk]) -> Tables:
    chunks = walk(width=TABLE_CHUNK * problem.page_size)
    return Tables(problem, chunks, given.tables, scratch["table"], scratch["table_arrived"])


def _decode(
    problem: Problem, config: Config, given: Operands, pages: Any, scales: Any, out: Any, scratch: dict[str, Any],
    held: dict[str, Any],
) -> None:  # fmt: skip
    walk = functools.partial(
        Walk, given.starts, given.lengths, problem.num_rows, 1, jnp.int32(0), given.counts[0], window=problem.window
    )
    Decode(
        problem, config, given.lengths, given.counts[0], _tables(problem, given, scratch, walk), pages, scales,
        given.decode_queries, out, given.sinks, held,
    ).run()  # fmt: skip


def _prefill(
    problem: Problem, config: Config, given: Operands, pages: Any, scales: Any, out: Any, scratch: dict[str, Any],
    held: dict[str, Any],
) -> None:  # fmt: skip
    walk = functools.partial(
        Walk, given.starts, given.lengths, problem.num_rows, config.query_tile, given.counts[0], given.counts[1],
        window=problem.window,
    )  # fmt: skip
    blocks = walk(width=config.prefill_pages * problem.page_size)
    tables = _tables(problem, given, scratch, walk)
    stream = Stream(problem, config, blocks, tables, pages, scales, given.queries, held)
    softmax = Softmax(problem, config, held, scratch["zeros"], given.sinks)
    Prefill(problem, config, blocks, stream, softmax, out, held["written"]).run()


def _kernel(*refs: Any, problem: Problem, config: Config) -> None:
    *operands, decode_out, out, pages, scales, scratch = refs
    given = Operands(*operands)
    scratch["zeros"][...] = jnp.zeros_like(scratch["zeros"])

    def write_decodes(held: dict[str, Any]) -> None:
        TokenWriter(
            problem, given.index, given.counts[0], pages, given.decode_new, scales, given.decode_scales, held
        ).run()  # fmt: skip

    def write(held: dict[str, Any]) -> None:
        Writer(
            problem, given.starts, given.index, given.counts, pages, given.new, scales, given.new_scales,
            held, scratch["write_arrived"], scratch["written"], scratch["unwritten"],
        ).run()  # fmt: skip

    # Every sequence may read what another one writes in this step, so all is written before anything is read.
    pl.run_scoped(write_decodes, write_decode_scratch(problem))
    pl.run_scoped(write, write_scratch(problem))
    decode = functools.partial(_decode, problem, config, given, pages, scales, decode_out, scratch)
    pl.run_scoped(decode, decode_scratch(problem, config))
    prefill = functools.partial(_prefill, problem, config, given, pages, scales, out, scratch)
    pl.run_scoped(prefill, prefill_scratch(problem, config))


def attention(problem: Problem, config: Config, context: Context, operands: Operands) -> tuple[Any, ...]:
    """Runs the kernel.

    Returns:
      [D, K, rows of a decode, query lanes] of tokens that are alone in their sequence, anything behind them; [T', N * query lanes] of the
      others, zero behind them and anything in front; pages, and scales or None, in place of those given.
    """
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    num_scalars = NUM_SCALARS + tables_stay(problem)
    specs = [
        None if array is None else in_vmem if name == "sinks" else in_hbm
        for name, array in zip(Operands._fields[num_scalars:], operands[num_scalars:], strict=True)
    ]
    results = (operands.decode_queries, operands.queries, operands.pages, operands.scales)
    shapes = [None if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype) for array in results]
    given = [name for name, array in zip(Operands._fields, operands, strict=True) if array is not None]
    aliases = {given.index("pages"): 2} | ({} if operands.scales is None else {given.index("scales"): 3})
    scratch = {
        "table": pltpu.SMEM((TABLE_RING, 1, TABLE_CHUNK), jnp.int32),
        "unwritten": pltpu.SMEM((WRITE_RING,), jnp.int32),
        "zeros": pltpu.VMEM((ZERO_ROWS, problem.query_lanes), jnp.dtype(problem.dtype)),
        "table_arrived": pltpu.SemaphoreType.DMA((TABLE_RING,)),
        "write_arrived": pltpu.SemaphoreType.DMA((WRITE_RING,)),
        "written": pltpu.SemaphoreType.DMA((WRITE_RING,)),
    }
    return tuple(
        pl.pallas_call(
            functools.partial(_kernel, problem=problem, config=config),
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=num_scalars,
                grid=(1,),
                in_specs=specs,
                out_specs=[None if shape is None else in_hbm for shape in shapes],
                scratch_shapes=(scratch,),
            ),
            input_output_aliases=aliases,
            compiler_params=context.compiler_params(),
            interpret=context.interpret,
            name="ragged_paged_attention",
        )(*operands)
    )
