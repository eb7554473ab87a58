"""The two halves of mode G as entries of their own, for those who put something between them or test one alone.

`ag_gmm1` is the all-gather fused with the first products and the activation; `gmm2_push` the second products fused with the way home and the
weighted sum. They meet in whole visits: rows [N, M, I], M = `block_rows` of one expert each, in the order that the tables of the first say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from tpu_serve.device.batch import pytree
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import op, tables
from tpu_serve.kernels.fused_moe_v2.buffers import Stage
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.fused_moe_v2.staged import run_stage


@pytree
@dataclass(frozen=True, slots=True)
class Inner:
    """Activated rows between the two entries, on one device.

    Attributes:
      rows: [N, M, I] in the problem's dtype. Only the first `num_rows` rows of a visit hold anything, and only as many visits as there are.
      row_tokens: the scalar tables that say which visit holds which rows; see `tables.kernel_tables`.
      everyone: the sorted slots of the group.
    """

    rows: jax.Array
    row_tokens: dict[str, jax.Array]
    everyone: tables.Sorted


def _check(problem: Problem, config: Config, call: Call, stage: Stage) -> None:
    if config.mode != "G":
        raise ValueError(f"the staged entries are parts of mode G, not of mode {config.mode}")
    if (reason := check(problem, config, call.chip, stage)) is not None:
        raise ValueError(reason)


def ag_gmm1(
    x: jax.Array,
    expert_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    *,
    problem: Problem,
    config: Config,
    call: Call,
) -> Inner:
    """Tokens of the group through the first products of the device's experts, inside `shard_map` over `call.axis`.

    With a pushing dispatch and `config.rounds` above 1, the rows of the nearest devices are multiplied while those of others are on their way.

    Args:
      x, expert_ids, routing_weights, weights: as for `op.fused_moe_v2`.

    Raises:
      ValueError: the config is not legal for this stage.
    """
    _check(problem, config, call, "first")
    op.check_arrays(replace(problem, post_norm=None), x, expert_ids, routing_weights, weights, None)
    x, expert_ids, routing_weights = op.normal_form(problem, x, expert_ids, routing_weights)
    everyone, scalars, inputs = op.prepare(problem, config, call, x, expert_ids, routing_weights)
    rows = run_stage(problem, config, call, "first", scalars, inputs | {"weights": weights})["inner"]
    return Inner(rows, scalars, everyone)


def gmm2_push(
    inner: Inner,
    expert_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    norm_weight: jax.Array | None = None,
    *,
    problem: Problem,
    config: Config,
    call: Call,
) -> jax.Array:
    """Activated rows through the second products, home, and summed: [T, H] of own tokens, or of all without sequence parallelism.

    Raises:
      ValueError: the config is not legal for this stage.
    """
    _check(problem, config, call, "second")
    op.check_arrays(problem, None, expert_ids, routing_weights, weights, norm_weight)
    num_rows = len(expert_ids)
    _, expert_ids, routing_weights = op.normal_form(problem, None, expert_ids, routing_weights)
    inputs: dict[str, Any] = {"weights": weights, "inner": inner.rows}
    if norm_weight is not None:
        inputs["norm_weight"] = op.padded_norm(problem, norm_weight)
    delivered = run_stage(problem, config, call, "second", inner.row_tokens, inputs)
    result = op.finish(problem, config, call, inner.everyone, inner.row_tokens, expert_ids, routing_weights, delivered)
    return result[:num_rows, : problem.hidden]
