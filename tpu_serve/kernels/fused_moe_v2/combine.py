"""The owner's last step in mode G: the weighted sum of each token's finished rows, in float32.

Rows that lie in the owner's own order are summed by `moe_combine`. Here are the sums that it does not make: of rows with scales, and of other
devices' tokens (combine rs).

Letters: N tokens, K choices, A rows that arrived, L x 128 a travelling row, B tokens of a block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2 import buffers, tile
from tpu_serve.kernels.fused_moe_v2.call import Call, scratch_of
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.legality import combine_is_resident, sum_by_windows
from tpu_serve.kernels.fused_moe_v2.problem import Problem, round_up
from tpu_serve.kernels.moe_combine import gather
from tpu_serve.kernels.moe_combine.problem import heuristic

F32 = jnp.float32


def _weighted_sum(slots: list[Any], row_of: Any, places: Any, weights: Any) -> jax.Array:
    """f32[1, L, 128] of one token: rows by `row_of(slot)`, f32; those without a place do not count, whatever is read for them."""
    total: Any = 0.0
    for slot in slots:
        total = total + jnp.where(places[0, 0, slot] >= 0, row_of(slot) * weights[0, 0, slot], 0.0)
    return total


def _resident_kernel(
    places: Any, weights: Any, arrived: Any, arrived_scale: Any, out: Any, scratch: dict[str, Any],
    *, block: int, top_k: int, hidden: int,
) -> None:  # fmt: skip
    rows, scales, sums = scratch["rows"], scratch.get("scales"), scratch["sums"]

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        pairs = [(arrived, rows), *([(arrived_scale, scales)] if scales is not None else [])]
        for source, target in pairs:
            pltpu.make_async_copy(source, target, scratch["semaphores"]).start()
        for source, target in pairs:
            pltpu.make_async_copy(source, target, scratch["semaphores"]).wait()

    def token(index: Any, _: None) -> None:
        slots = [index * top_k + choice for choice in range(top_k)]

        def row_of(slot: Any) -> jax.Array:
            place = pl.ds(jnp.maximum(places[0, 0, slot], 0), 1)
            row = rows[place].astype(F32)
            return row if scales is None else row * scales[place]

        sums[pl.ds(index, 1)] = _weighted_sum(slots, row_of, places, weights)

    jax.lax.fori_loop(0, block, token, None)
    out[...] = tile.flatten(sums[...], hidden).astype(out.dtype)


def _streaming_kernel(
    places: Any, next_places: Any, weights: Any, arrived: Any, arrived_scale: Any, out: Any, scratch: dict[str, Any],
    *, block: int, top_k: int, hidden: int,
) -> None:  # fmt: skip
    rows, sums, semaphores = scratch["rows"], scratch["sums"], scratch["semaphores"]
    scales: Any = scratch.get("scales")
    step = pl.program_id(0)
    parity = jax.lax.rem(step, 2)

    def start(of: Any, slot: Any) -> None:
        def token(index: Any, _: None) -> None:
            slots = [index * top_k + choice for choice in range(top_k)]
            # A choice without a row reads the first one and ignores it. All scalar reads come before the first copy; see `unrolled_for`.
            for at, place in [(at, jnp.maximum(of[0, 0, at], 0)) for at in slots]:
                for source, target in ((arrived, rows), (arrived_scale, scales)):
                    if source is not None:
                        pltpu.make_async_copy(
                            source.at[pl.ds(place, 1)], target.at[slot, pl.ds(at, 1)], semaphores.at[slot]
                        ).start()

        jax.lax.fori_loop(0, block, token, None)

    pl.when(step == 0)(lambda: start(places, 0))
    pl.when(step + 1 < pl.num_programs(0))(lambda: start(next_places, 1 - parity))
    for target in (rows,) if scales is None else (rows, scales):
        pltpu.make_async_copy(target.at[parity], target.at[parity], semaphores.at[parity]).wait()

    def token(index: Any, _: None) -> None:
        slots = [index * top_k + choice for choice in range(top_k)]

        def row_of(slot: Any) -> jax.Array:
            row = rows[parity, pl.ds(slot, 1)].astype(F32)
            return row if scales is None else row * scales[parity, pl.ds(slot, 1)]

        sums[pl.ds(index, 1)] = _weighted_sum(slots, row_of, places, weights)

    jax.lax.fori_loop(0, block, token, None)
    out[...] = tile.flatten(sums[...], hidden).astype(out.dtype)


def own_sums(
    problem: Problem,
    config: Config,
    call: Call,
    arrived: jax.Array,
    arrived_scale: jax.Array | None,
    expert_ids: jax.Array,
    places: jax.Array,
    weights: jax.Array,
    dtype: Any,
) -> jax.Array:
    """`combine` of rows that lie in the order of the tokens' own stable sort by expert: read in windows unless they have scales.

    Args:
      expert_ids: i32[N, K], -1 for none, no weight of the others being 0; places: of each in that order.
      Others: as in `combine`.
    """
    asked = sum_by_windows(problem, config, call.chip, jnp.dtype(dtype).name)
    if asked is None:
        places = jnp.where(expert_ids < 0, -1, places)
        return combine(problem, config, call, arrived, arrived_scale, places, weights, dtype)
    cut = heuristic(asked, call.chip)
    return gather.sums(asked, cut, Context(call.chip, call.interpret), arrived, expert_ids, weights)


def combine(
    problem: Problem,
    config: Config,
    call: Call,
    arrived: jax.Array,
    arrived_scale: jax.Array | None,
    places: jax.Array,
    weights: jax.Array,
    dtype: Any,
) -> jax.Array:
    """y[n] = sum_k weights[n, k] * arrived[places[n, k]] (* arrived_scale there).

    Args:
      arrived: [A, L, 128], A = `buffers.delivered_rows`; arrived_scale: f32[A, 1, 128], the scale of a row in every lane, or None.
      places: i32[N, K], -1 for none; weights: f32[N, K].

    Returns:
      [N, padded H] in `dtype`.
    """
    num_tokens, top_k = places.shape
    block, hidden = config.combine_tokens, problem.padded_hidden
    padded = round_up(num_tokens, block)
    width = block * top_k
    blocks = padded // block
    place_rows = jnp.pad(places, ((0, padded - num_tokens), (0, 0)), constant_values=-1).reshape(blocks, 1, width)
    weight_rows = jnp.pad(weights, ((0, padded - num_tokens), (0, 0))).reshape(blocks, 1, width)
    in_smem = lambda index: pl.BlockSpec((1, 1, width), index, memory_space=pltpu.SMEM)  # noqa: E731
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    this, after = in_smem(lambda step: (step, 0, 0)), in_smem(lambda step: (jnp.minimum(step + 1, blocks - 1), 0, 0))
    resident = combine_is_resident(problem, config, call.chip)
    out = pl.pallas_call(
        functools.partial(_resident_kernel if resident else _streaming_kernel, block=block, top_k=top_k, hidden=hidden),
        out_shape=jax.ShapeDtypeStruct((padded, hidden), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(blocks,),
            in_specs=[this, *([] if resident else [after]), this, in_hbm, None if arrived_scale is None else in_hbm],
            out_specs=pl.BlockSpec((block, hidden), lambda step: (step, 0)),
            scratch_shapes=(scratch_of(buffers.combine(problem, config, resident)),),
        ),
        compiler_params=call.compiler_params(None, 1),
        interpret=call.interpret,
        name="fused_moe_combine",
    )(place_rows, *([] if resident else [place_rows]), weight_rows, arrived, arrived_scale)
    return out[:num_tokens]
