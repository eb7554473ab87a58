"""Which problems and configs the kernel runs on a chip, and why not the others. Plain Python."""

from __future__ import annotations

from typing import Any

from tpu_serve.device.chip import MIB, Chip
from tpu_serve.kernels.fused_moe_v2 import buffers
from tpu_serve.kernels.fused_moe_v2.config import COMBINES, DISPATCHES, MODES, Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem, ceil_div, item_bytes, malformed
from tpu_serve.kernels.moe_combine import problem as windows

VMEM_SHARE = 0.92
"""Of the chip's VMEM; the rest is left to the compiler."""

MAX_MODE_D_TOKENS = 1024
"""Beyond this the products of mode D no longer hide behind any chip's weight reads, and its unrolled code grows large."""

SMEM_SHARE = 0.9

MAX_ARRIVING_BYTES = 2**31
"""How far a semaphore counts is not documented; bytes in a signed word are the least that it can be."""


def vmem_bytes(problem: Problem, config: Config, stage: buffers.Stage = "whole") -> int:
    """Bytes of VMEM that the kernel takes: its buffers, and the values of one product that do not fit in registers."""
    p = problem
    tree = buffers.mode_d(p, config) if config.mode == "D" else buffers.mode_g(p, config, stage)
    rows = buffers.round_up(p.group_tokens if config.mode == "D" else config.tile_rows, buffers.ROW_MULTIPLE)
    of_product = config.compact_rows if config.mode == "D" and config.compact_rows else rows
    values = (4 * of_product * config.tile_columns + 2 * rows * p.padded_hidden) * 4
    if p.weights.widens:
        values += 2 * buffers.WIDENED_ROWS * max(config.tile_columns, p.padded_hidden) * 4
    return _total(tree) + values + MIB


COMBINE_SHARE = 0.6
"""Of VMEM, up to which the final sum brings all rows that arrived there whole, instead of one by one."""


def _total(tree: dict[str, Any]) -> int:
    return sum(buffer.num_bytes for _, buffer in buffers.leaves(tree))


def combine_is_resident(problem: Problem, config: Config, chip: Chip) -> bool:
    """Whether the final sum brings all rows that arrived into VMEM."""
    whole = buffers.combine(problem, config, True)
    return (
        _total({name: whole[name] for name in ("rows", "scales") if name in whole}) <= COMBINE_SHARE * chip.vmem_bytes
    )


def sum_by_windows(problem: Problem, config: Config, chip: Chip, dtype: str) -> windows.Problem | None:
    """The final sum of an owner's rows as `moe_combine` is asked for it, or None where it cannot be: it knows of no scales."""
    p = problem
    if p.combine_type in ROW_LIMITS or config.combine == "rs":
        return None
    experts, rows = p.local_experts * p.num_devices, buffers.delivered_rows(p, config)
    asked = windows.Problem(
        p.local_tokens, p.top_k, experts, rows, p.padded_hidden, p.combine_type, "float32", 1, dtype, p.row_lanes
    )
    return asked if windows.supported(asked, chip) is None else None


def combine_bytes(problem: Problem, config: Config, chip: Chip) -> tuple[int, int]:
    """Bytes of VMEM and SMEM that mode G's final sum takes, in a kernel of its own."""
    if (asked := sum_by_windows(problem, config, chip, "float32")) is not None:
        return windows.vmem_bytes(asked, windows.heuristic(asked, chip), "combine"), 4 * 2 * windows.table_width(asked)
    block = config.combine_tokens
    scratch = _total(buffers.combine(problem, config, combine_is_resident(problem, config, chip)))
    # Two windows of the output and a flat value; two windows of three lists of numbers.
    results = buffers.Buffer((3, block, problem.padded_hidden)).num_bytes
    return scratch + results + MIB, 2 * 3 * block * problem.top_k * 4


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM: tables that are there for the whole call, and windows."""
    p = problem
    if config.mode == "D":
        return 4 * (2 * p.local_experts + 1)
    visits = max_visits(p, config)
    runs = p.local_experts * config.rounds * p.num_devices
    words = 7 * visits + 4 * runs + 3 + config.rounds
    if config.dispatch == "dedup_push":
        words += 2 * p.num_devices * (ceil_div(p.local_tokens, 2) + 1)
    if p.dispatch_type in ROW_LIMITS:
        words += p.group_tokens
    windows = 2 * p.num_devices * buffers.window_rows(config) * LANES
    return 4 * (words + windows * (2 if p.scale_on_input else 1))


def arriving_bytes(problem: Problem) -> float:
    """Most bytes of finished rows that pushes bring home to a device."""
    p = problem
    return p.local_tokens * p.top_k * p.row_lanes * LANES * item_bytes(p.combine_type)


def max_visits(problem: Problem, config: Config) -> int:
    return buffers.max_rows(problem) // config.block_rows + problem.local_experts * config.rounds


def supports(problem: Problem, chip: Chip) -> str | None:
    """Why no config could run this problem on this chip, or None. Whether the tiles of one fit is `check`'s question."""
    p = problem
    if (reason := malformed(p)) is not None:
        return reason
    weights = p.weights
    if weights.activation not in chip.peak_ops:
        return (
            f"format {p.format} has products in {weights.activation}, which {chip.name} has no arithmetic for "
            f"(it has {', '.join(chip.peak_ops)})"
        )
    if weights.weight == "float4_e2m1fn" and chip.name not in ("tpu7x", "cpu"):
        return f"format {p.format} stores float4_e2m1fn, a type that {chip.name} does not have"
    if weights.activation == "bfloat16" and p.dtype == "float32":
        return f"format {p.format} would round float32 tokens to bfloat16; use bfloat16 tokens"
    return None


def check(problem: Problem, config: Config, chip: Chip, stage: buffers.Stage = "whole") -> str | None:
    """Why this config cannot run this problem on this chip, or None."""
    return supports(problem, chip) or _unfit(problem, config) or _too_big(problem, config, chip, stage)


def _unfit(p: Problem, c: Config) -> str | None:
    if c.mode not in MODES:
        return f"mode {c.mode!r} is unknown; known are {', '.join(MODES)}"
    if c.tile_columns < 1 or c.tile_columns % LANES or p.padded_intermediate % c.tile_columns:
        return f"tile_columns {c.tile_columns} must be a multiple of {LANES} that divides {p.padded_intermediate}"
    block = p.weights.block
    if block and c.tile_columns % block and block % c.tile_columns and c.tile_columns != p.padded_intermediate:
        return f"tile_columns {c.tile_columns} and scale blocks of {block} rows must divide one another"
    if c.ring_slots < 2:
        return f"ring_slots must be at least 2, got {c.ring_slots}"
    if c.mode == "D":
        if p.group_tokens > MAX_MODE_D_TOKENS:
            return f"mode D is for at most {MAX_MODE_D_TOKENS} tokens, not {p.group_tokens}"
        if c.compact_rows < 0 or c.compact_rows % buffers.ROW_MULTIPLE:
            return f"compact_rows {c.compact_rows} must be 0 or a multiple of {buffers.ROW_MULTIPLE}"
        if c.compact_rows > buffers.round_up(p.group_tokens, buffers.ROW_MULTIPLE):
            return f"compact_rows {c.compact_rows} are more than the {p.group_tokens} tokens"
        return None
    return _unfit_g(p, c)


def _unfit_g(p: Problem, c: Config) -> str | None:
    if c.dispatch not in DISPATCHES:
        return f"dispatch {c.dispatch!r} is unknown; known are {', '.join(DISPATCHES)}"
    if c.combine not in COMBINES:
        return f"combine {c.combine!r} is unknown; known are {', '.join(COMBINES)}"
    if c.tile_rows < 1 or c.tile_rows % 32:
        return f"tile_rows {c.tile_rows} must be a multiple of 32"
    if c.block_rows < 1 or c.block_rows % c.tile_rows:
        return f"block_rows {c.block_rows} must be a multiple of tile_rows {c.tile_rows}"
    if c.combine_tokens < 1 or c.combine_tokens % 16:
        return f"combine_tokens {c.combine_tokens} must be a multiple of 16"
    arriving = arriving_bytes(p)
    if c.combine == "push" and p.num_devices > 1 and arriving >= MAX_ARRIVING_BYTES:
        return (
            f"{arriving / 2**30:.1f} GiB of rows come home to a device, counted by one semaphore that is trusted up to "
            f"{MAX_ARRIVING_BYTES / 2**30:.0f} GiB; use combine rs or fewer tokens"
        )
    if not 1 <= c.rounds <= p.num_devices:
        return f"rounds {c.rounds} must lie between 1 and the {p.num_devices} devices"
    if c.dispatch == "xla_ag" and c.rounds > 1:
        return "rounds need a dispatch that pushes: xla_ag has all tokens before the kernel begins"
    if c.dispatch != "xla_ag" and not p.sequence_parallel:
        return f"dispatch {c.dispatch} needs sequence parallelism: otherwise every device has all tokens already"
    if c.combine == "rs" and p.combine_type in ROW_LIMITS:
        return f"combine rs sums on the way and cannot carry {p.combine_type}: a row's scale is its sender's"
    if c.combine == "rs" and p.output_gather_dtype is not None:
        return f"combine rs sums for every device at once: nothing is gathered that could travel as {p.output_gather_dtype}"
    return None


def _too_big(p: Problem, c: Config, chip: Chip, stage: buffers.Stage) -> str | None:
    needed, had = vmem_bytes(p, c, stage), int(chip.vmem_bytes * VMEM_SHARE)
    if needed > had:
        return (
            f"mode {c.mode} with tile_columns {c.tile_columns}, ring_slots {c.ring_slots}, block_rows {c.block_rows} needs "
            f"{needed / MIB:.1f} MiB of VMEM; {chip.name} has {had / MIB:.1f} MiB for it"
        )
    if c.mode == "G" and stage != "first":
        for name, needed, had in zip(
            ("VMEM", "SMEM"), combine_bytes(p, c, chip), (chip.vmem_bytes, chip.smem_bytes), strict=True
        ):
            if needed > had * VMEM_SHARE:
                return f"the final sum of {c.combine_tokens} tokens a step needs {needed / MIB:.1f} MiB of {name}; {chip.name} has {had / MIB:.1f}"
    needed, had = smem_bytes(p, c), int(chip.smem_bytes * SMEM_SHARE)
    if needed > had:
        return f"the tables need {needed / 1024:.0f} KiB of SMEM; {chip.name} has {had / 1024:.0f} KiB for them"
    return None
