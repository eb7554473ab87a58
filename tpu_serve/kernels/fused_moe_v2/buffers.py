"""The on-chip buffers of each mode, declared once: the kernels allocate them and `legality` counts them.

A declaration is a dict of `Buffer`s by name; nested dicts are groups of their own. Plain Python, no jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ITEM_BITS, ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem, ceil_div, round_up

F32 = "float32"
ROW_MULTIPLE = 32
"""Rows of a vector register of 8-bit values, the most of any type."""

WIDENED_ROWS = 256
"""Rows of a weight tile that are widened at a time."""

EXPERT_MULTIPLE = 8
"""Sublanes of a vector register of 32-bit values."""

Stage = Literal["whole", "first", "second"]
FIRST = ("gate_up", "gate_up_scale", "gate_up_bias")
SECOND = ("down", "down_scale", "down_bias")
STAGE_FIELDS: dict[str, tuple[str, ...]] = {"whole": FIRST + SECOND, "first": FIRST, "second": SECOND}


@dataclass(frozen=True, slots=True)
class Buffer:
    """Scratch of a kernel. `space` "vmem" or "smem", or "dma" for semaphores, whose dtype is ignored."""

    shape: tuple[int, ...]
    dtype: str = F32
    space: str = "vmem"

    @property
    def num_bytes(self) -> int:
        """Bytes of VMEM with the padding of vector registers: 128 lanes, and as many sublanes as make 32 bits of 8 rows.

        Values of 4 bits are counted as bytes, as the compiler of libtpu 0.0.42 does.
        """
        if self.space != "vmem":
            return 0
        *leading, rows, columns = (1, *self.shape) if len(self.shape) == 1 else self.shape
        bits = ITEM_BITS[self.dtype]
        rows = round_up(rows, 8 * 32 // bits) if rows > 1 else rows
        return math.prod(leading) * rows * round_up(columns, LANES) * max(bits, 8) // 8


def leaves(tree: dict[str, Any]) -> Iterator[tuple[str, Buffer]]:
    """All buffers with their names."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield name, value


def semaphores(*shape: int) -> Buffer:
    return Buffer(shape, space="dma")


def tile_shapes(problem: Problem, config: Config, stage: Stage) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of each weight field's part in a ring slot."""
    p, columns = problem, config.tile_columns
    weights = p.weights
    shapes = {
        "gate_up": ((2, p.padded_hidden, columns), weights.weight),
        "down": ((columns, p.padded_hidden), weights.weight),
    }
    if weights.scaled:
        shapes["gate_up_scale"] = ((2, weights.scale_rows(p.padded_hidden), columns), F32)
        shapes["down_scale"] = ((weights.num_blocks(columns), 1, p.padded_hidden), F32)
    if p.gate_up_bias:
        shapes["gate_up_bias"] = ((2, 1, columns), F32)
    if p.down_bias:
        shapes["down_bias"] = ((1, p.padded_hidden), F32)
    return {field: shapes[field] for field in STAGE_FIELDS[stage] if field in shapes}


def ring(problem: Problem, config: Config, stage: Stage = "whole") -> dict[str, Any]:
    """Slots of the weight ring, one semaphore each, and room for widened values where the format asks."""
    shapes = tile_shapes(problem, config, stage)
    group: dict[str, Any] = {
        "slots": {field: Buffer((config.ring_slots, *shape), dtype) for field, (shape, dtype) in shapes.items()},
        "semaphores": semaphores(config.ring_slots),
    }
    if problem.weights.widens:
        group["wide"] = {
            field: Buffer(shapes[field][0], problem.weights.activation)
            for field in ("gate_up", "down")
            if field in shapes
        }
    return group


def _activation_scale(problem: Problem, rows: int) -> Buffer:
    columns = problem.weights.num_blocks(problem.padded_hidden) if problem.weights.group_scales else 1
    return Buffer((rows, columns))


def _hidden(problem: Problem, config: Config, rows: int) -> Buffer:
    """Values between the two products: already in the type of the second one, unless they are quantised once the tile is complete."""
    return Buffer((rows, config.tile_columns), F32 if problem.weights.quantises_rows else problem.weights.activation)


def mode_d_tile_rows(problem: Problem) -> int:
    """Rows of one product: as many as keep the sums of a panel in registers."""
    rows = round_up(problem.group_tokens, ROW_MULTIPLE)
    return next(size for size in (128, 96, 64, 32) if rows % size == 0)


def picked_rows(problem: Problem, config: Config) -> int:
    """Rows that hold all of an expert's, in whole products."""
    rows = round_up(problem.group_tokens, ROW_MULTIPLE)
    return round_up(rows, config.compact_rows) if config.compact_rows else rows


def coefficients_shape(problem: Problem, config: Config) -> tuple[int, int]:
    """Of mode D's routing weights: tokens by experts, or experts by tokens where rows are picked by expert."""
    rows = round_up(problem.group_tokens, ROW_MULTIPLE)
    if config.compact_rows:
        return round_up(problem.local_experts, EXPERT_MULTIPLE), rows
    return rows, round_up(problem.local_experts, LANES)


def mode_d(problem: Problem, config: Config) -> dict[str, Any]:
    p = problem
    rows = round_up(p.group_tokens, ROW_MULTIPLE)
    lanes = (p.row_lanes, LANES)
    group: dict[str, Any] = {
        "ring": ring(p, config),
        "rows": Buffer((p.group_tokens, *lanes), p.dispatch_type),
        "activations": Buffer((rows, p.padded_hidden), p.weights.activation),
        "hidden": _hidden(p, config, config.compact_rows or mode_d_tile_rows(p)),
        "sum": Buffer((rows, p.padded_hidden)),
        "partial": Buffer((p.group_tokens, *lanes), p.combine_type),
        "partials": Buffer((p.num_devices, p.local_tokens, *lanes), p.combine_type),
        "coefficients": Buffer(coefficients_shape(p, config)),
        "small_semaphore": semaphores(),
        "sent": semaphores(3),
        "arrived": semaphores(3),
    }
    if p.dispatch_type in ROW_LIMITS:
        group["row_scale"] = Buffer((1, rows))
    if p.weights.quantises_rows:
        group["activation_scale"] = _activation_scale(p, rows)
    if p.post_norm is not None:
        group["norm_weight"] = Buffer((1, p.padded_hidden))
    if p.post_norm is not None or config.compact_rows:
        group["expert_sum"] = Buffer((picked_rows(p, config), p.padded_hidden))
    if config.compact_rows:
        picked = picked_rows(p, config)
        group["ranks"] = Buffer(coefficients_shape(p, config))
        group["rank_columns"] = Buffer(coefficients_shape(p, config)[::-1])
        group["spoilt"] = Buffer((rows, 1))
        group["picked"] = Buffer((picked, p.padded_hidden), p.weights.activation)
        group["picked_coefficient"] = Buffer((picked, 1))
        if p.weights.quantises_rows:
            group["picked_scale"] = _activation_scale(p, picked)
    if p.combine_type in ROW_LIMITS:
        scales = round_up(p.group_tokens, LANES)
        group["partial_scale"] = Buffer((1, scales))
        group["partial_scales"] = Buffer((p.num_devices, 1, scales))
    if not p.sequence_parallel:
        group["finished"] = Buffer((p.local_tokens, *lanes), p.output_gather_type)
        group["gathered"] = Buffer((p.group_tokens, *lanes), p.output_gather_type)
        if p.output_gather_type in ROW_LIMITS:
            scales = round_up(p.local_tokens, LANES)
            group["finished_scale"] = Buffer((1, scales))
            group["gathered_scales"] = Buffer((p.num_devices, 1, scales))
    return group


def window_rows(config: Config) -> int:
    """Rows of 128 sorted slots that cover any `block_rows` of them."""
    return ceil_div(config.block_rows, LANES) + 1


def mode_g(problem: Problem, config: Config, stage: Stage = "whole") -> dict[str, Any]:
    p, rows = problem, config.block_rows
    lanes = (p.row_lanes, LANES)
    group: dict[str, Any] = {
        "ring": ring(p, config, stage),
        "row_semaphores": semaphores(2),
        "done_sent": semaphores(2),
        "done_arrived": semaphores(),
    }
    if stage != "second":
        windows = (2, p.num_devices, window_rows(config), 1, LANES)
        group["token_window"] = Buffer(windows, "int32", "smem")
        group["window_semaphores"] = semaphores(2)
        group["rows"] = Buffer((2, rows, *lanes), p.dispatch_type)
        group["activations"] = Buffer((rows, p.padded_hidden), p.weights.activation)
        if p.weights.quantises_rows:
            group["activation_scale"] = _activation_scale(p, rows)
        if p.dispatch_type in ROW_LIMITS:
            group["token_scale"] = Buffer((2, rows, LANES))
        if p.scale_on_input:
            group["weight_window"] = Buffer(windows, F32, "smem")
            group["input_weight"] = Buffer((2, rows, LANES))
        if config.dispatch != "xla_ag":
            group["token_sent"] = semaphores()
        if config.resident:
            group["tokens"] = Buffer((p.group_tokens, *lanes), p.dispatch_type)
        if config.dispatch != "xla_ag" or config.resident:
            group["token_arrived"] = semaphores(config.rounds)
            group["rounds_here"] = Buffer((1,), "int32", "smem")
    if stage != "whole":
        group["inner"] = Buffer((2, rows, p.padded_intermediate), p.dtype)
    if stage == "whole":
        group["hidden"] = _hidden(p, config, config.tile_rows)
    if stage != "first":
        group["sum"] = Buffer((rows, p.padded_hidden))
        group["done"] = Buffer((2, rows, *lanes), p.combine_type)
        if p.combine_type in ROW_LIMITS:
            group["done_scale"] = Buffer((2, rows, 1, LANES))
        if p.post_norm is not None:
            group["norm_weight"] = Buffer((1, p.padded_hidden))
    return group


def combine(problem: Problem, config: Config, resident: bool) -> dict[str, Any]:
    """Of the final sum's own kernel. `resident`: all rows that arrived are brought to VMEM whole, instead of one by one."""
    p, block = problem, config.combine_tokens
    held = (delivered_rows(p, config),) if resident else (2, block * p.top_k)
    group: dict[str, Any] = {
        "rows": Buffer((*held, p.row_lanes, LANES), p.combine_type),
        "sums": Buffer((block, p.row_lanes, LANES)),
        "semaphores": semaphores(*(() if resident else (2,))),
    }
    if p.combine_type in ROW_LIMITS:
        group["scales"] = Buffer((*held, 1, LANES))
    return group


def max_rows(problem: Problem) -> int:
    """Most rows that a device's experts can receive."""
    return problem.group_tokens * min(problem.top_k, problem.local_experts)


def delivered_rows(problem: Problem, config: Config) -> int:
    """Rows of the buffer in HBM that finished rows are written into."""
    return max_rows(problem) if config.combine == "rs" else problem.local_tokens * problem.top_k
