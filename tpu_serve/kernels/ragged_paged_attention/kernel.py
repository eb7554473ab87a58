"""The kernel: three phases over one cache, in one call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.ragged_paged_attention.attend import Attention, phase_scratch
from tpu_serve.kernels.ragged_paged_attention.config import TABLE_RING, WRITE_RING, Config, Phase, phases
from tpu_serve.kernels.ragged_paged_attention.problem import TABLE_CHUNK, Problem
from tpu_serve.kernels.ragged_paged_attention.softmax import ZERO_ROWS, Softmax
from tpu_serve.kernels.ragged_paged_attention.stream import Stream
from tpu_serve.kernels.ragged_paged_attention.walk import Walk
from tpu_serve.kernels.ragged_paged_attention.write import Writer, write_scratch


class Operands(NamedTuple):
    """What the kernel takes, in the order in which it takes it; None where the problem has no such thing.

    Attributes:
      starts: i32[S + 1], where each sequence's tokens begin in T.
      lengths: i32[S], tokens of each sequence after this step.
      index: i32[T], where each token goes in the cache.
      counts: i32[2], tokens that are alone in their sequence, which come first, and all tokens.
      tables: i32[S * C, 1, 128], C pieces of 128 pages for each sequence.
      decode_queries: [D, K, rows of a decode, query lanes] of the first D tokens, those behind a group's heads being zero.
      queries: [K, G, T', query lanes], T' being whole tiles.
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
    new: Any
    new_scales: Any
    sinks: Any
    pages: Any
    scales: Any


NUM_SCALARS = 4


def _phase(
    problem: Problem, phase: Phase, given: Operands, pages: Any, scales: Any, out: Any, scratch: dict[str, Any],
    held: dict[str, Any],
) -> None:  # fmt: skip
    begin, end = (jnp.int32(0), given.counts[0]) if phase.is_decode else (given.counts[0], given.counts[1])
    walk = functools.partial(
        Walk, given.starts, given.lengths, problem.num_rows, phase.tile, begin, end, window=problem.window
    )
    blocks = walk(width=phase.pages * problem.page_size)
    queries = given.decode_queries if phase.is_decode else given.queries
    stream = Stream(
        problem, phase, blocks, walk(width=TABLE_CHUNK * problem.page_size), given.tables, pages, scales, queries,
        scratch["table"], held, scratch["table_arrived"], held["arrived"], held["queries_arrived"],
    )  # fmt: skip
    softmax = Softmax(problem, phase, held, scratch["zeros"], given.sinks)
    Attention(problem, phase, blocks, stream, softmax, out, held["written"]).run()


def _kernel(*refs: Any, problem: Problem, config: Config) -> None:
    *operands, decode_out, out, pages, scales, scratch = refs
    given = Operands(*operands)
    scratch["zeros"][...] = jnp.zeros_like(scratch["zeros"])

    def write(held: dict[str, Any]) -> None:
        Writer(
            problem, given.starts, given.index, given.counts[1], pages, given.new, scales, given.new_scales,
            held, scratch["write_arrived"], scratch["written"], scratch["unwritten"],
        ).run()  # fmt: skip

    # Every sequence may read what another one writes in this step, so all is written before anything is read.
    pl.run_scoped(write, write_scratch(problem))
    for phase, result in zip(phases(problem, config), (decode_out, out), strict=True):
        attend = functools.partial(_phase, problem, phase, given, pages, scales, result, scratch)
        pl.run_scoped(attend, phase_scratch(problem, phase))


def attention(problem: Problem, config: Config, context: Context, operands: Operands) -> tuple[Any, ...]:
    """Runs the kernel.

    Returns:
      [D, K, rows of a decode, query lanes] of tokens that are alone in their sequence; [K, G, T', query lanes] of the others, in tiles that
      have any, zero at rows that are no token's; pages, and scales or None, in place of those given. The rest of both results is anything.
    """
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    arrays = operands[NUM_SCALARS:]
    specs = [
        None if array is None else in_vmem if name == "sinks" else in_hbm
        for name, array in zip(Operands._fields[NUM_SCALARS:], arrays, strict=True)
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
                num_scalar_prefetch=NUM_SCALARS,
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
