"""The gradient of the weights: for each group its rows of lhs, transposed, times its rows of dout.

The grid is (tiles of N_in, tiles of N_out, visits). The result's window stays in VMEM while the visits of its group last; a group without
rows has one visit, which writes zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.grouped_matmul.config import MAX_IN_PANEL, MAX_PANEL, Config, check, max_visits
from tpu_serve.kernels.grouped_matmul.forward import F32, dot, for_panels, is_own
from tpu_serve.kernels.grouped_matmul.problem import Problem
from tpu_serve.kernels.grouped_matmul.visits import list_visits


def _body(
    problem: Problem,
    config: Config,
    tile: Any,
    group: Any,
    begin: Any,
    end: Any,
    counts: Any,
    lhs: Any,
    dout: Any,
    out: Any,
    total: Any,
) -> None:
    p, c = problem, config
    visit, last = pl.program_id(2), counts[0] - 1
    opens_group = (visit == 0) | (group[visit] != group[jnp.maximum(visit - 1, 0)])
    closes_group = (visit == last) | (group[visit] != group[jnp.minimum(visit + 1, last)])

    @pl.when(opens_group)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def add() -> None:
        own = is_own(begin[visit], end[visit], c.tile_rows)

        def own_rows(block: Any) -> Any:
            # Zero in both: a row of another group, or behind all of them, may hold NaN. Chosen in float32, which every chip can.
            return jnp.where(own, block.astype(F32), 0.0).astype(block.dtype)

        def part(rows: Any) -> None:
            left = own_rows(lhs[:, rows])

            def panel(columns: Any) -> None:
                for z in range(p.num_matrices):
                    total[z, rows, columns] += dot(left, own_rows(dout[z, :, columns]), (0, 0))

            for_panels(c.tile_columns, MAX_PANEL[p.dtype], panel)

        for_panels(c.tile_in or p.n_in, MAX_IN_PANEL, part)

    pl.when(end[visit] > begin[visit])(add)

    @pl.when(closes_group)
    def _() -> None:
        out[0] = total[...].astype(out.dtype)


def weight_gradient(
    problem: Problem,
    config: Config,
    context: Context,
    lhs: jax.Array,
    dout: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | int,
) -> jax.Array:
    """The product of role "weight_gradient".

    Args:
      lhs: [R, N_in].
      dout: [Z, R, N_out] of the same type.
      group_sizes: i32[E_all], E_all at least group_offset + E.
      group_offset: group of the first matrix.

    Returns:
      [E, Z, N_in, N_out], zero for groups without rows. Rows in none of the E groups do not enter.

    Raises:
      ValueError: the config is not legal; the message says why.
    """
    p, c = problem, config
    if (reason := check(p, c, context.chip)) is not None:
        raise ValueError(reason)
    tile_in, matrices = c.tile_in or p.n_in, p.num_matrices
    visits = list_visits(
        group_sizes,
        group_offset,
        experts=p.experts,
        rows=p.rows,
        tile_rows=c.tile_rows,
        length=max_visits(p, c),
        with_empty=True,
    )
    call = pl.pallas_call(
        functools.partial(_body, p, c),
        name="grouped_weight_gradient",
        out_shape=jax.ShapeDtypeStruct((p.experts, matrices, p.n_in, p.n_out), jnp.dtype(p.out_type)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(p.n_in // tile_in, p.n_out // c.tile_columns, visits.counts[0]),
            in_specs=[
                pl.BlockSpec((c.tile_rows, tile_in), lambda i, n, v, tile, *_: (tile[v], i)),
                pl.BlockSpec((matrices, c.tile_rows, c.tile_columns), lambda i, n, v, tile, *_: (0, tile[v], n)),
            ],
            out_specs=pl.BlockSpec(
                (1, matrices, tile_in, c.tile_columns), lambda i, n, v, tile, group, *_: (group[v], 0, i, n)
            ),
            scratch_shapes=[pltpu.VMEM((matrices, tile_in, c.tile_columns), F32)],
        ),
        compiler_params=context.compiler_params(),
        interpret=context.interpret,
    )
    return call(visits.tile, visits.group, visits.begin, visits.end, visits.counts, lhs, dout)
