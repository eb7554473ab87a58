"""Configs without a table: a sensible one by rule. Plain Python."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.legality import MAX_ARRIVING_BYTES, arriving_bytes, check, supports, vmem_bytes
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem, item_bytes, round_up

RING_SHARE = 0.55
"""Of VMEM, for mode D's ring: more would not help once three tiles are on their way."""

RESIDENT_SHARE = 0.3
"""Of VMEM, for mode G's tokens: what is left must hold the experts."""

PUSH_DISPATCH_TOKENS = {"tpu7x": 1024}
"""Up to so many tokens pushes inside the kernel are taken before a gather by XLA; 2048 on other chips. Calculated from links and launches."""


MOST_MODE_D_TOKENS = 256
"""Modelled schedules of more have not been compared with mode G's."""


def compact_rows(problem: Problem) -> int:
    """`Config.compact_rows` that mode D is worth running with: twice the standard deviation more than an expert's rows, or 0.

    All of 64 tokens go through an expert in the time in which its weights are read; so many more do not on any chip, if only because
    each of them is quantised, activated and added. Where an expert has about half of the tokens nothing is gained by picking them out.
    """
    rows = problem.num_tokens * problem.top_k / problem.num_experts
    if problem.group_tokens <= 64:
        return 0
    sizes = (size for size in (32, 64, 128) if rows + 2 * rows**0.5 <= size <= problem.group_tokens / 2)
    return min(sizes, default=0)


def mode_d_tokens(problem: Problem, chip: Chip) -> int:
    """Most tokens for which mode D is worth it: nothing has to be sorted, gathered or sent by row.

    With all tokens through every active expert that is about the chip's ridge, up to which the products hide behind reading the weights.
    """
    if compact_rows(problem) and not problem.weights.widens:
        return MOST_MODE_D_TOKENS
    ridge = 1.1 * ridge_rows(problem, chip)
    # Widening a tile takes longer than its products with few rows, picked or not: mode G's schedules are as short.
    most = 128 if problem.weights.widens else MOST_MODE_D_TOKENS
    return max((size for size in (32, 64, 128, MOST_MODE_D_TOKENS) if size <= min(ridge, most)), default=32)


def ridge_rows(problem: Problem, chip: Chip) -> float:
    """Rows of an expert at which its products take as long as reading its weights."""
    weights = problem.weights
    return chip.peak_ops[weights.activation] * item_bytes(weights.weight) / 2 / chip.hbm_bytes_per_second


def tile_widths(problem: Problem) -> list[int]:
    """Legal `tile_columns`, widest first; those that fill a 256 wide matrix unit come before the others."""
    whole = problem.padded_intermediate
    widths = [width for width in range(whole, 0, -LANES) if whole % width == 0]
    return sorted(widths, key=lambda width: (width % 256 != 0 and width != whole, -width))


def heuristic(problem: Problem, chip: Chip, mode: str | None = None) -> Config:
    """A config that is legal for the problem on the chip.

    Raises:
      ValueError: there is none; the message is the reason for the smallest one tried.
    """
    reason = supports(problem, chip)
    if reason is not None:  # before anything is looked up by the types that a chip has
        raise ValueError(reason)
    modes = [mode]
    if mode is None:  # rows too long for mode D's sums may still be gathered
        modes = ["D", "G"] if problem.group_tokens <= mode_d_tokens(problem, chip) else ["G"]
    for config in itertools.chain.from_iterable(
        _mode_d(problem) if one == "D" else _with_resident_tokens(problem, chip) for one in modes
    ):
        reason = check(problem, config, chip)
        if reason is None and (config.mode == "G" or _ring_is_modest(problem, config, chip)):
            return config
    raise ValueError(reason or "no config was tried")


def _ring_is_modest(problem: Problem, config: Config, chip: Chip) -> bool:
    """Wide tiles only while the ring leaves room; the narrowest is always good."""
    without_ring = dataclasses.replace(config, ring_slots=0)
    ring = vmem_bytes(problem, config) - vmem_bytes(problem, without_ring)
    return ring <= RING_SHARE * chip.vmem_bytes or config.tile_columns == tile_widths(problem)[-1]


def _mode_d(problem: Problem) -> Iterator[Config]:
    for rows in sorted({compact_rows(problem), 0}, reverse=True):
        for slots in (3, 2):
            for width in tile_widths(problem):
                yield Config("D", width, slots, compact_rows=rows)


def _with_resident_tokens(problem: Problem, chip: Chip) -> Iterator[Config]:
    """Mode G's configs, each with the tokens in VMEM first where they leave most of it free."""
    for config in _mode_g(problem, chip):
        resident = dataclasses.replace(config, resident=True)
        tokens = vmem_bytes(problem, resident) - vmem_bytes(problem, config)
        if tokens <= RESIDENT_SHARE * chip.vmem_bytes:
            yield resident
        yield config


def _mode_g(problem: Problem, chip: Chip) -> Iterator[Config]:
    """Best first. The rows of an expert decide the tiles; whether experts fit decides if they are kept or read again."""
    p = problem
    rows = p.group_tokens * p.top_k / p.num_experts
    most = round_up(p.group_tokens, 32)
    tile_rows = 32 if rows <= 16 else 64 if rows <= 64 else 128 if rows < 512 or chip.matrix_unit < 256 else 256
    tile_rows = min(tile_rows, most)
    dispatch, combine = exchange(p, chip)
    base = Config("G", p.padded_intermediate, 2, tile_rows, tile_rows, dispatch, combine)
    while tile_rows >= 32:
        expert_blocks = 2 * tile_rows if rows > tile_rows else tile_rows
        for width in tile_widths(p):  # two whole experts in VMEM: weights are read once
            slots = 2 * (p.padded_intermediate // width)
            if slots <= 8:
                yield dataclasses.replace(
                    base, tile_columns=width, ring_slots=slots, tile_rows=tile_rows, block_rows=expert_blocks
                )
        wanted = round_up(int(min(max(rows, 1), ridge_rows(p, chip))), tile_rows)
        for block_rows in range(min(wanted, 1024), 0, -tile_rows):
            for width in tile_widths(p):
                if width <= max(LANES, p.padded_intermediate // 2):
                    yield dataclasses.replace(
                        base, tile_columns=width, ring_slots=3, tile_rows=tile_rows, block_rows=block_rows
                    )
        tile_rows = tile_rows // 2 // 32 * 32


def exchange(problem: Problem, chip: Chip) -> tuple[str, str]:
    """Dispatch and combine of mode G.

    Rows are pushed home rather than reduce-scattered: summing on the experts' device goes through every token of the group, most of which
    have few experts there, and modelled schedules see that cost more than the links save. What is more than pushes may bring home is summed
    first, where the types allow it.
    """
    p = problem
    combine = "push"
    is_too_much = p.num_devices > 1 and arriving_bytes(p) >= MAX_ARRIVING_BYTES
    if is_too_much and p.combine_type not in ROW_LIMITS and p.output_gather_dtype is None:
        combine = "rs"
    if not p.sequence_parallel or p.num_devices == 1:
        return "xla_ag", combine
    if p.num_devices >= 16 or p.top_k * 1.5 <= p.num_devices:
        return "dedup_push", combine
    if p.group_tokens <= PUSH_DISPATCH_TOKENS.get(chip.name, 2048):
        return "push_ag", combine
    return "xla_ag", combine
