"""The owner's last step in mode G: the weighted sum of each token's finished rows, in float32.

Letters: N tokens, K choices, A rows that arrived, L x 128 a travelling row, B tokens of a block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.fused_moe_v2 import tile
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.problem import LANES, round_up

F32 = jnp.float32


def _kernel(
    places: Any, next_places: Any, weights: Any, arrived: Any, arrived_scale: Any, out: Any, rows: Any, scales: Any, sums: Any,
    semaphores: Any, *, block: int, top_k: int, hidden: int,
) -> None:  # fmt: skip
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

    @pl.when(step == 0)
    def _() -> None:
        start(places, 0)

    @pl.when(step + 1 < pl.num_programs(0))
    def _() -> None:
        start(next_places, 1 - parity)

    for target in (rows, scales):
        if target is not None:
            pltpu.make_async_copy(target.at[parity], target.at[parity], semaphores.at[parity]).wait()

    def token(index: Any, _: None) -> None:
        first = index * top_k
        own_rows = rows[parity, pl.ds(first, top_k)].astype(F32)
        own_scales = None if scales is None else scales[parity, pl.ds(first, top_k)]
        total = jnp.zeros(rows.shape[2:], F32)
        for choice in range(top_k):
            row = own_rows[choice] * weights[0, 0, first + choice]
            if own_scales is not None:
                row = row * own_scales[choice]
            total = total + jnp.where(places[0, 0, first + choice] >= 0, row, 0.0)
        sums[pl.ds(index, 1)] = total[None]

    jax.lax.fori_loop(0, block, token, None)
    out[...] = tile.flatten(sums[...], hidden).astype(out.dtype)


def combine(
    arrived: jax.Array,
    arrived_scale: jax.Array | None,
    places: jax.Array,
    weights: jax.Array,
    hidden: int,
    dtype: Any,
    block: int,
    call: Call,
) -> jax.Array:
    """y[n] = sum_k weights[n, k] * arrived[places[n, k]] (* arrived_scale there).

    Args:
      arrived: [A, L, 128]; arrived_scale: f32[A, 1, 128], the scale of a row in every lane, or None.
      places: i32[N, K], -1 for none; weights: f32[N, K].
      hidden: H of the result.
      block: B, tokens of a step.

    Returns:
      [N, H] in `dtype`.
    """
    num_tokens, top_k = places.shape
    padded = round_up(num_tokens, block)
    width = block * top_k
    blocks = padded // block
    place_rows = jnp.pad(places, ((0, padded - num_tokens), (0, 0)), constant_values=-1).reshape(blocks, 1, width)
    weight_rows = jnp.pad(weights, ((0, padded - num_tokens), (0, 0))).reshape(blocks, 1, width)
    lanes = arrived.shape[1:]
    in_smem = lambda index: pl.BlockSpec((1, 1, width), index, memory_space=pltpu.SMEM)  # noqa: E731
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        lambda *refs: _kernel(*refs, block=block, top_k=top_k, hidden=hidden),
        out_shape=jax.ShapeDtypeStruct((padded, hidden), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(blocks,),
            in_specs=[
                in_smem(lambda step: (step, 0, 0)),
                in_smem(lambda step: (jnp.minimum(step + 1, blocks - 1), 0, 0)),
                in_smem(lambda step: (step, 0, 0)),
                in_hbm,
                None if arrived_scale is None else in_hbm,
            ],
            out_specs=pl.BlockSpec((block, hidden), lambda step: (step, 0)),
            scratch_shapes=(
                pltpu.VMEM((2, width, *lanes), arrived.dtype),
                None if arrived_scale is None else pltpu.VMEM((2, width, 1, LANES), F32),
                pltpu.VMEM((block, *lanes), F32),
                pltpu.SemaphoreType.DMA((2,)),
            ),
        ),
        compiler_params=call.compiler_params(None, 1),
        interpret=call.interpret,
        name="fused_moe_combine",
    )(place_rows, place_rows, weight_rows, arrived, arrived_scale)
    return out[:num_tokens]
