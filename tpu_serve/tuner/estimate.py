"""How long a layer may take with a config: calculated from bytes, operations, links and copies. Plain Python.

Nothing here is measured. Routing is uniform, rows of an expert a Poisson number. Rates are a chip's peaks; what is assumed beside them stands
below with a name, and holds for ranking configs of one problem only. Letters as in `kernels/fused_moe_v2/problem.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tpu_serve.device.chip import Chip, slice_grid
from tpu_serve.kernels.fused_moe_v2.bound import (
    FIXED_SECONDS,
    ROW_COPY_SECONDS,
    active_experts,
    busiest_link,
    fewest_links,
    hit_probability,
)
from tpu_serve.kernels.fused_moe_v2.buffers import ROW_MULTIPLE
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem, item_bytes, round_up

LAUNCH_SECONDS = FIXED_SECONDS["rs"] - FIXED_SECONDS["push"]
"""Launching a collective of XLA's: assumed there."""

COPY_SECONDS = 0.5e-6
"""From the start of a large copy to its first byte: assumed."""

VISIT_SECONDS = 1e-6
"""Beginning and ending a block of an expert's rows: assumed."""

PRODUCT_SECONDS = 0.1e-6
"""Beginning and ending the products of one tile with some rows: assumed."""

ROW_LOAD_SECONDS = 5e-9
"""Gathering a row that lies in VMEM: assumed."""

SUM_SECONDS = 50e-9
"""A token's final sum, whether it has a row there or not: assumed."""

WIDENED_PER_SECOND = 7e11
"""Weights that become another type in VMEM: from the lengths of compiled loops on v6e, taken for all chips."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one layer on one device.

    Attributes:
      seconds: what cannot be hidden, and the busiest of the parts.
      parts: seconds that each resource is busy: "hbm", "matrix unit", "widening", "ring" (tiles waiting for their slot), "links", "row copies".
      weight_bytes: read from HBM, more than once where an expert's tiles do not stay.
    """

    seconds: float
    parts: Mapping[str, float]
    weight_bytes: float

    @property
    def us(self) -> float:
        return self.seconds * 1e6


@dataclass(frozen=True, slots=True)
class _Links:
    """Seconds that exchanges between all devices take."""

    problem: Problem
    chip: Chip
    shape: tuple[int, ...]

    def direct(self, bytes_per_pair: float) -> float:
        """Every device sends so much to every other."""
        if not self.chip.link_bytes_per_second:
            return 0.0
        pairs = busiest_link(self.shape, self.chip.devices_per_chip)
        return bytes_per_pair * pairs / self.chip.link_bytes_per_second

    def relayed(self, bytes_per_token: float) -> float:
        """Every chip receives what the others have, once, from its neighbours."""
        links, chips = fewest_links(self.shape), math.prod(self.shape)
        if not links or not self.chip.link_bytes_per_second:
            return 0.0
        rate = links * self.chip.link_bytes_per_second
        return (chips - 1) / chips * self.problem.num_tokens * bytes_per_token / rate


def _links(problem: Problem, chip: Chip) -> _Links:
    shape = slice_grid(chip, problem.num_devices)
    if shape is None:
        raise ValueError(f"no slice of {problem.num_devices} {chip.name} devices is known")
    return _Links(problem, chip, shape)


@functools.lru_cache(maxsize=256)
def _poisson(mean: float) -> tuple[tuple[int, float], ...]:
    """(number, probability) of all numbers that matter, 0 left out."""
    reach = 8 * math.sqrt(mean) + 8
    numbers = range(max(1, int(mean - reach)), int(mean + reach) + 1)
    return tuple((n, math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))) for n in numbers)


def expected_pieces(mean: float, size: int) -> float:
    """Pieces of `size` rows, the last one filled up, that an expert's rows are cut into on average."""
    return sum(probability * -(-number // size) for number, probability in _poisson(mean))


def estimate(problem: Problem, config: Config, chip: Chip) -> Estimate:
    """Raises: ValueError, for a slice that is not known."""
    return (_mode_d if config.mode == "D" else _mode_g)(problem, config, chip, _links(problem, chip))


def outside_seconds(problem: Problem, config: Config, chip: Chip) -> float:
    """Of that, what XLA's collectives around the kernels take that a config asks for: on the links, which no kernel's schedule shows, and to
    be launched. Those that all configs have, of routing tables, are not counted.

    Raises:
      ValueError: for a slice that is not known.
    """
    if config.mode == "D" or problem.num_devices == 1:
        return 0.0
    links, seconds = _links(problem, chip), 0.0
    if config.dispatch == "xla_ag" and problem.sequence_parallel:
        seconds += LAUNCH_SECONDS + links.relayed(problem.hidden * item_bytes(problem.dispatch_type))
    if config.combine == "rs":
        seconds += LAUNCH_SECONDS + links.relayed(problem.hidden * item_bytes(problem.combine_type))
    return seconds


def _expert_bytes(p: Problem) -> float:
    weights, hidden, inner = p.weights, p.padded_hidden, p.padded_intermediate
    scales = 2 * weights.scale_rows(hidden) * inner + weights.num_blocks(inner) * hidden if weights.scaled else 0
    return 3 * hidden * inner * item_bytes(weights.weight) + 4 * scales


def _tiles(
    p: Problem, config: Config, chip: Chip, reads: float, products: float, rows: int
) -> tuple[dict[str, float], float]:
    """Busy seconds for experts that are read so often and multiplied so often with so many rows; seconds until the first tile is there."""
    per_expert = config.tiles_per_expert(p)
    # Loading weights into the matrix unit takes as long as the products of about half as many rows as it has; a narrow tile leaves the rest idle.
    used_rows = max(rows, chip.matrix_unit // 2)
    used_columns = round_up(config.tile_columns, chip.matrix_unit) / config.tile_columns
    matrix = 3 * p.padded_hidden * p.padded_intermediate
    multiply = products * used_rows * 2 * matrix * used_columns / chip.peak_ops[p.weights.activation]
    multiply += products * per_expert * PRODUCT_SECONDS
    widen = products * matrix / WIDENED_PER_SECOND if p.weights.widens else 0.0
    read = _expert_bytes(p) / per_expert / chip.hbm_bytes_per_second
    # A slot's turn is a copy and then the tile's use, and as many turns as there are slots overlap.
    turns = reads * per_expert * (COPY_SECONDS + read) + multiply + widen
    parts = {"hbm": reads * per_expert * read, "matrix unit": multiply, "widening": widen}
    return {**parts, "ring": turns / config.ring_slots}, COPY_SECONDS + read


def _mode_d(p: Problem, config: Config, chip: Chip, links: _Links) -> Estimate:
    active, rows = active_experts(p), round_up(p.group_tokens, ROW_MULTIPLE)
    products = active
    if config.compact_rows:
        mean = p.num_tokens * p.top_k / p.num_experts
        products, rows = p.num_experts / p.num_devices * expected_pieces(mean, config.compact_rows), config.compact_rows
    parts, first = _tiles(p, config, chip, active, products, rows)
    if config.compact_rows:  # picking rows out and putting them back are products with all tokens
        parts["matrix unit"] += products * 4 * rows * p.group_tokens * p.padded_hidden / chip.peak_ops["bfloat16"]
    own = p.num_tokens / p.num_devices * p.hidden
    exchange = links.direct(own * (item_bytes(p.dispatch_type) + item_bytes(p.combine_type)))
    seconds = FIXED_SECONDS["D"] + exchange + first + max(parts.values())
    return Estimate(seconds, {**parts, "links": exchange}, active * _expert_bytes(p))


def _mode_g(p: Problem, config: Config, chip: Chip, links: _Links) -> Estimate:
    experts, mean = p.num_experts / p.num_devices * config.rounds, p.num_tokens * p.top_k / p.num_experts
    mean /= config.rounds
    visits = experts * expected_pieces(mean, config.block_rows)
    reads = experts * -math.expm1(-mean) if config.keeps_experts(p) else visits
    parts, first = _tiles(p, config, chip, reads, experts * expected_pieces(mean, config.tile_rows), config.tile_rows)

    rows, share = p.num_tokens * p.top_k / p.num_devices, p.num_tokens / p.num_devices
    row, home = p.hidden * item_bytes(p.dispatch_type), p.hidden * item_bytes(p.combine_type)
    hit = hit_probability(p.num_experts, p.top_k, max(1, p.num_experts // p.num_devices))
    gathered = p.num_tokens if config.resident else rows
    moved = p.num_tokens * row + gathered * row + 2 * rows * home
    copies = rows * (ROW_LOAD_SECONDS if config.resident else ROW_COPY_SECONDS)
    exposed = busy = 0.0
    match config.dispatch:
        case "xla_ag" if p.sequence_parallel:
            busy = links.relayed(row)
            exposed = busy + LAUNCH_SECONDS
        case "push_ag":
            busy = links.direct(share * row)
            exposed = busy / config.rounds
        case "dedup_push":
            busy = links.direct(share * hit * row)
            exposed = busy / config.rounds
            copies += share * hit * (p.num_devices - 1) * ROW_COPY_SECONDS
    if config.combine == "rs":
        reduced = links.relayed(home)
        busy, exposed = busy + reduced, exposed + reduced / 4 + LAUNCH_SECONDS
        moved += 2 * p.num_tokens * home
        exposed += p.num_tokens * SUM_SECONDS
    else:
        exposed += share * SUM_SECONDS
        busy += links.direct(share * p.top_k / p.num_devices * home)
        copies += (experts * p.num_devices + max(0.0, visits - experts)) * ROW_COPY_SECONDS
    parts["hbm"] += moved / chip.hbm_bytes_per_second
    parts |= {"links": busy, "row copies": copies}
    seconds = FIXED_SECONDS["push"] + exposed + first + visits * VISIT_SECONDS + max(parts.values())
    return Estimate(seconds, parts, reads * _expert_bytes(p))
