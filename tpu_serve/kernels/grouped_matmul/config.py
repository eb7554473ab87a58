"""How a grouped product is run: tiles, which are legal on a chip, and sensible ones. Plain Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tpu_serve.device.chip import MIB, Chip
from tpu_serve.kernels.fused_moe_v2.problem import LANES, ceil_div, item_bytes, round_up
from tpu_serve.kernels.grouped_matmul.problem import Problem, malformed

VMEM_SHARE = 0.92
"""Of the chip's VMEM; the rest is left to the compiler."""

SMEM_SHARE = 0.9

ROW_MULTIPLE = 16
"""Rows of bfloat16 that lie in one tile of memory."""

MAX_PANEL = {"bfloat16": 1024, "float32": 256}
"""Columns of one product, by the type of its inputs. Wider ones take several times longer to compile; a full float32 product is six of
bfloat16."""

MAX_IN_PANEL = 512
"""Rows of a weight gradient that one product makes."""


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles.

    Attributes:
      tile_rows: rows of a visit.
      tile_columns: columns of the result in a tile, of each matrix.
      ring_slots: (not weight_gradient) weight tiles that are in VMEM or on their way.
      tile_in: (weight_gradient) rows of the result, which are columns of lhs, in a tile; 0 is all.
    """

    tile_rows: int
    tile_columns: int
    ring_slots: int = 2
    tile_in: int = 0


def max_visits(problem: Problem, config: Config) -> int:
    """Most pairs of a row tile and a group that meet; for a weight gradient an empty group has one too.

    A group that begins inside a tile adds one visit to those of the tiles. One more stands for no visit at all.
    """
    return ceil_div(problem.rows, config.tile_rows) + problem.experts


def vmem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of VMEM that the kernel takes: windows of what streams, and the values of a product that do not fit in registers."""
    p, c = problem, config
    item, out_item = int(item_bytes(p.dtype)), int(item_bytes(p.out_type))
    if p.role == "weight_gradient":
        tile_in = c.tile_in or p.n_in
        windows = 2 * c.tile_rows * (tile_in + p.num_matrices * c.tile_columns) * item
        tile = p.num_matrices * tile_in * c.tile_columns
        panel = min(tile_in, MAX_IN_PANEL)
        # Beside the panel of results: both inputs without foreign rows, and one of them transposed.
        values = 4 * (
            2 * panel * min(c.tile_columns, MAX_PANEL[p.dtype]) + c.tile_rows * (2 * tile_in + c.tile_columns)
        )
        return windows + tile * (4 + 2 * out_item) + values + MIB
    rows = 2 * p.num_inputs * c.tile_rows * p.contraction * item
    ring = c.ring_slots * p.num_matrices * p.contraction * c.tile_columns * item
    results = 2 * (2 if p.in_place else 1) * p.num_results * c.tile_rows * c.tile_columns * out_item
    values = 4 * c.tile_rows * min(c.tile_columns, MAX_PANEL[p.dtype]) * (p.num_matrices + 2)
    if p.dtype == "float32":  # split into bfloat16 parts, of which a full product is made
        values += (
            2 * c.tile_rows * p.contraction * item + 2 * p.contraction * min(c.tile_columns, MAX_PANEL[p.dtype]) * item
        )
    return rows + ring + results + values + MIB


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of SMEM: the tables of visits and groups."""
    return 4 * (5 * max_visits(problem, config) + problem.experts + 2)


def check(problem: Problem, config: Config, chip: Chip) -> str | None:
    """Why this config cannot run this problem on this chip, or None."""
    p, c = problem, config
    if (reason := _refused(p, chip)) is not None:
        return reason
    if c.tile_rows < 1 or c.tile_rows % ROW_MULTIPLE:
        return f"tile_rows {c.tile_rows} must be a multiple of {ROW_MULTIPLE}"
    if c.tile_columns < 1 or c.tile_columns % LANES or p.columns % c.tile_columns:
        return f"tile_columns {c.tile_columns} must be a multiple of {LANES} that divides {p.columns}"
    if p.role != "weight_gradient":
        if c.tile_in:
            return "tile_in is for weight_gradient, the only one that has tiles of N_in"
        if c.ring_slots < 2:
            return f"ring_slots must be at least 2, got {c.ring_slots}"
    elif c.tile_in < 0 or c.tile_in % LANES or (c.tile_in and p.n_in % c.tile_in):
        return f"tile_in {c.tile_in} must be a multiple of {LANES} that divides {p.n_in}"
    for name, needed, had in (
        ("VMEM", vmem_bytes(p, c), int(chip.vmem_bytes * VMEM_SHARE)),
        ("SMEM", smem_bytes(p, c), int(chip.smem_bytes * SMEM_SHARE)),
    ):
        if needed > had:
            return (
                f"{p.role} with tile_rows {c.tile_rows}, tile_columns {c.tile_columns} needs {needed / MIB:.1f} MiB of {name}; "
                f"{chip.name} has {had / MIB:.1f} MiB for it"
            )
    return None


def _refused(problem: Problem, chip: Chip) -> str | None:
    if (reason := malformed(problem)) is not None:
        return reason
    if problem.dtype not in chip.peak_ops:
        return f"{chip.name} has no arithmetic for {problem.dtype} (it has {', '.join(chip.peak_ops)})"
    return None


def heuristic(problem: Problem, chip: Chip) -> Config:
    """A config that is legal for the problem on the chip.

    Raises:
      ValueError: there is none; the message is the reason for the smallest one tried.
    """
    reason = _refused(problem, chip)
    if reason is None:
        for config in _candidates(problem, chip):
            reason = check(problem, config, chip)
            if reason is None:
                return config
    raise ValueError(reason)


def supported(problem: Problem, chip: Chip) -> str | None:
    """Why no config could run this problem on this chip, or None."""
    try:
        heuristic(problem, chip)
    except ValueError as reason:
        return str(reason)
    return None


def _widths(whole: int) -> list[int]:
    """Legal tiles of so many columns, widest first; those that fill a 256 wide matrix unit come before the others."""
    widths = [width for width in range(whole, 0, -LANES) if whole % width == 0]
    return sorted(widths, key=lambda width: (width % 256 != 0 and width != whole, -width))


def _row_tiles(problem: Problem, chip: Chip) -> list[int]:
    """Best first. A tile larger than a group's rows is multiplied in vain, a smaller one waits for the matrix unit to take the weights."""
    rows = problem.rows / problem.experts
    most = 64 if rows <= 16 else 128 if rows < 512 or chip.matrix_unit < 256 else 256
    most = min(most, round_up(problem.rows, ROW_MULTIPLE))
    return sorted({size for size in (most, *(s for s in (128, 64, 32, 16) if s < most))}, reverse=True)


def _candidates(problem: Problem, chip: Chip) -> Iterator[Config]:
    """Best first: wide tiles, because the rows are read again for every tile of columns, while three weight tiles or at least two fit."""
    tiles = _row_tiles(problem, chip)
    if problem.role == "weight_gradient":
        # Reads of both inputs again are fewest where the tile of the result is large.
        for rows in tiles:
            pairs = itertools.product(_widths(problem.n_in), _widths(problem.n_out))
            for tile_in, columns in sorted(pairs, key=lambda pair: -(pair[0] * pair[1])):
                yield Config(rows, columns, tile_in=0 if tile_in == problem.n_in else tile_in)
        return
    for rows in tiles:
        for width in _widths(problem.columns):
            for slots in (3, 2):
                yield Config(rows, width, slots)
