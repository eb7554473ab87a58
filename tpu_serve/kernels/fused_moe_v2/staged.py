"""Calls of mode G's body: the whole of it, or its stages alone. See `mode_g.py`; all inside `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.collective_ids import CollectiveId
from tpu_serve.kernels.fused_moe_v2 import buffers
from tpu_serve.kernels.fused_moe_v2.call import Call, scratch_of
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.legality import max_visits
from tpu_serve.kernels.fused_moe_v2.mode_g import Body
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem
from tpu_serve.kernels.fused_moe_v2.ring import TileShape

F32 = jnp.float32
_IDS = {
    "whole": CollectiveId.FUSED_MOE_G,
    "first": CollectiveId.FUSED_MOE_FIRST,
    "second": CollectiveId.FUSED_MOE_SECOND,
}


def _outputs(problem: Problem, config: Config, stage: buffers.Stage) -> dict[str, jax.ShapeDtypeStruct]:
    p = problem
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    if stage != "second" and config.dispatch != "xla_ag" and not config.resident:
        tokens = (p.group_tokens, p.row_lanes, LANES)
        outputs["tokens"] = jax.ShapeDtypeStruct(tokens, jnp.dtype(p.dispatch_type))
    if stage == "first":
        inner = (max_visits(p, config), config.block_rows, p.padded_intermediate)
        outputs["inner"] = jax.ShapeDtypeStruct(inner, jnp.dtype(p.dtype))
    else:
        rows = buffers.delivered_rows(p, config)
        outputs["arrived_done"] = jax.ShapeDtypeStruct((rows, p.row_lanes, LANES), jnp.dtype(p.combine_type))
        if p.combine_type in ROW_LIMITS:
            outputs["arrived_done_scale"] = jax.ShapeDtypeStruct((rows, 1, LANES), F32)
    return outputs


def run_stage(
    problem: Problem,
    config: Config,
    call: Call,
    stage: buffers.Stage,
    tables: dict[str, jax.Array],
    inputs: dict[str, Any],
) -> dict[str, jax.Array]:
    """One call of the body.

    Args:
      stage: "whole", "first" or "second".
      tables: scalar tables of `tables.kernel_tables`, with `dedup_runs` for that dispatch, and `token_scales` f32[G] where tokens travel
        in 8 bits.
      inputs: `weights`; `x` (own tokens, or with `xla_ag` all of them, [., L, 128]), `sorted_tokens` (see `Gather`) and, when the routing
        weight multiplies the input, `sorted_weights`; `norm_weight` f32[1, H]; `inner` [N, M, I] for the second stage.

    Returns:
      `arrived_done` [A, L, 128] with `arrived_done_scale` f32[A, 1, 128] where it is 8 bits wide; `inner` from the first stage.
    """
    shape = TileShape.of(problem, config)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    outputs = _outputs(problem, config, stage)
    return pl.pallas_call(
        Body(problem, config, shape, call.axis, stage),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            in_specs=[jax.tree.map(lambda _: in_hbm, inputs)],
            out_specs=jax.tree.map(lambda _: in_hbm, outputs),
            scratch_shapes=(scratch_of(buffers.mode_g(problem, config, stage)),),
        ),
        compiler_params=call.compiler_params(_IDS[stage], problem.num_devices),
        interpret=call.interpret,
        name=f"fused_moe_g_{stage}",
    )(tables, inputs)
