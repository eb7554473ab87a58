"""Rows times the matrices of their groups: the forward product and the gradient of its rows, which contracts the other axis of the weights.

The grid is (tiles of columns, visits). Rows and results come and go by the pipeline of the grid; a tile of weights is brought by hand into
a ring, once for all visits of its group, and the next group's comes while this one's visits last. The result's window stays in VMEM
between visits of a row tile, where each visit replaces the rows of its own group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import round_up
from tpu_serve.kernels.fused_moe_v2.tile import activate
from tpu_serve.kernels.grouped_matmul.config import MAX_PANEL, Config, check, max_visits
from tpu_serve.kernels.grouped_matmul.problem import Problem
from tpu_serve.kernels.grouped_matmul.visits import list_visits

F32 = jnp.float32


def for_panels(size: int, most: int, body: Callable[[Any], None]) -> None:
    """body(pl.ds of one panel) for all of `size`, in a loop: unrolled, the products of a large tile make long programs."""
    panels = -(-size // most)
    width = round_up(-(-size // panels), 128)
    whole = size // width

    def one(index: Any, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * width, width), width))

    if whole == 1:
        body(pl.ds(0, width))
    else:
        lax.fori_loop(0, whole, one, None)
    if size % width:
        body(pl.ds(whole * width, size % width))


def dot(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """f32 product that contracts one axis of each."""
    # Full float32 products: the matrix unit's default rounds float32 to bfloat16 first.
    precision = lax.Precision.HIGHEST if left.dtype == F32 else None
    return lax.dot_general(left, right, (((axes[0],), (axes[1],)), ((), ())), precision, F32)


def is_own(begin: jax.Array, end: jax.Array, tile_rows: int) -> jax.Array:
    """bool[tile_rows, 1]: the rows of a visit's own group."""
    row = lax.broadcasted_iota(jnp.int32, (tile_rows, 1), 0)
    return (row >= begin) & (row < end)


def _body(
    problem: Problem,
    config: Config,
    tile: Any,
    group: Any,
    begin: Any,
    end: Any,
    ordinal: Any,
    active: Any,
    counts: Any,
    rows: Any,
    weights: Any,
    *others: Any,
) -> None:
    p, c = problem, config
    *existing, out, ring, arrived = others
    visit, previous = pl.program_id(1), jnp.maximum(pl.program_id(1) - 1, 0)
    opens_tile = (visit == 0) | (tile[visit] != tile[previous])
    opens_group = (visit == 0) | (group[visit] != group[previous])
    num_active = counts[1]
    # Weight tiles in the order in which they are needed: all groups with rows, for each tile of columns.
    number, total = pl.program_id(0) * num_active + ordinal[visit], pl.num_programs(0) * num_active

    def weight_copy(number: Any) -> Any:
        first = pl.multiple_of(lax.div(number, num_active) * c.tile_columns, c.tile_columns)
        columns = pl.ds(first, c.tile_columns)
        matrices = weights.at[active[lax.rem(number, num_active)]]
        source = matrices.at[:, columns, :] if p.role == "input_gradient" else matrices.at[:, :, columns]
        slot = lax.rem(number, c.ring_slots)
        return pltpu.make_async_copy(source, ring.at[slot], arrived.at[slot])

    def start(number: Any) -> None:
        @pl.when(number < total)
        def _() -> None:
            weight_copy(number).start()

    @pl.when((pl.program_id(0) == 0) & (visit == 0))
    def _() -> None:
        for ahead in range(c.ring_slots - 1):
            start(jnp.int32(ahead))

    @pl.when(opens_group & (num_active > 0))
    def _() -> None:
        weight_copy(number).wait()
        # Into the slot of the tile before this one, whose visits are over.
        start(number + c.ring_slots - 1)

    if existing:

        @pl.when(opens_tile)
        def _() -> None:
            out[...] = existing[0][...]

    slot, own = lax.rem(number, c.ring_slots), is_own(begin[visit], end[visit], c.tile_rows)

    def panel(columns: Any) -> None:
        if p.role == "input_gradient":
            products = [dot(rows[z], ring[slot, z, columns, :], (1, 1)) for z in range(p.num_matrices)]
            results = [sum(products[1:], products[0])]
        else:
            products = [dot(rows[0], ring[slot, z, :, columns], (1, 0)) for z in range(p.num_matrices)]
            results = products if p.activation is None else [activate(products[0], products[1], p.activation)]
        for index, result in enumerate(results):
            others_rows = out[index, :, columns].astype(F32)
            # Chosen, not added: what lies in other rows, and what a foreign matrix makes of them, may be NaN.
            out[index, :, columns] = jnp.where(own, result, others_rows).astype(out.dtype)

    for_panels(c.tile_columns, MAX_PANEL[p.dtype], panel)


def multiply(
    problem: Problem,
    config: Config,
    context: Context,
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | int,
    existing: jax.Array | None = None,
) -> jax.Array:
    """The product of role "forward" or "input_gradient".

    Args:
      rows: [num_inputs, R, contraction].
      weights: [E, Z, N_in, N_out].
      group_sizes: i32[E_all], E_all at least group_offset + E.
      group_offset: group of the first matrix.
      existing: [num_results, R, columns] of the out type, which the result takes the place of; exactly if `problem.in_place`.

    Returns:
      [num_results, R, columns]. Rows in none of the E groups are those of `existing`, or unspecified without it.

    Raises:
      ValueError: the config is not legal; the message says why.
    """
    p, c = problem, config
    if (reason := check(p, c, context.chip)) is not None:
        raise ValueError(reason)
    visits = list_visits(
        group_sizes,
        group_offset,
        experts=p.experts,
        rows=p.rows,
        tile_rows=c.tile_rows,
        length=max_visits(p, c),
        with_empty=False,
    )
    num_rows = p.rows
    if existing is not None and context.interpret is not False:
        # The simulator does not cut the padding of a last tile off again where a result takes the memory of an input.
        num_rows = round_up(p.rows, c.tile_rows)
        existing = jnp.pad(existing, ((0, 0), (0, num_rows - p.rows), (0, 0)))
    item = jnp.dtype(p.dtype)
    rows_spec = pl.BlockSpec((p.num_inputs, c.tile_rows, p.contraction), lambda n, v, tile, *_: (0, tile[v], 0))
    out_spec = pl.BlockSpec((p.num_results, c.tile_rows, c.tile_columns), lambda n, v, tile, *_: (0, tile[v], n))
    ring = (p.contraction, c.tile_columns)
    if p.role == "input_gradient":
        ring = ring[::-1]
    call = pl.pallas_call(
        functools.partial(_body, p, c),
        name=f"grouped_{p.role}",
        out_shape=jax.ShapeDtypeStruct((p.num_results, num_rows, p.columns), jnp.dtype(p.out_type)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(p.columns // c.tile_columns, visits.counts[0]),
            in_specs=[rows_spec, pl.BlockSpec(memory_space=pl.ANY), *([out_spec] if p.in_place else [])],
            out_specs=out_spec,
            scratch_shapes=[
                pltpu.VMEM((c.ring_slots, p.num_matrices, *ring), item),
                pltpu.SemaphoreType.DMA((c.ring_slots,)),
            ],
        ),
        input_output_aliases={len(visits) + 2: 0} if p.in_place else {},
        compiler_params=context.compiler_params(),
        interpret=context.interpret,
    )
    return call(*visits, rows, weights, *([existing] if p.in_place else []))[:, : p.rows]
