"""What no kernel can beat: calculated lower bounds of a layer's time from bytes, operations and links. Plain Python.

Routing is taken as uniform and expectations as exact. A schedule's bound is the time of its busiest resource, plus what it cannot hide, plus a
fixed cost of entering that is assumed, not measured. Letters as in `problem.py`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

from tpu_serve.device.chip import Chip, slice_grid
from tpu_serve.kernels.fused_moe_v2.problem import Problem, item_bytes

ROW_COPY_SECONDS = 20e-9
"""One copy of a single row occupies the queue about so long: published for v6e, assumed for the others."""

FIXED_SECONDS = {"D": 6e-6, "push": 15e-6, "rs": 20e-6, "dedup": 15e-6}
"""Assumed: barrier, first copy and, with XLA collectives, their launches."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound of one layer on one device.

    Attributes:
      schedule: "D", "push" (gathered, rows pushed home), "rs" (reduce-scattered) or "dedup" (each token to a device once).
      seconds: of the best schedule.
      limit: the resource that sets it: "hbm", "matrix unit", "links" or "row copies".
      parts: seconds that each resource is busy in that schedule.
      weight_bytes: of the active experts; hbm_bytes: those and the rows that mode G moves.
      operations: multiplications and additions of the routed rows.
      by_schedule: seconds of each schedule.
    """

    schedule: str
    seconds: float
    limit: str
    parts: dict[str, float]
    weight_bytes: float
    hbm_bytes: float
    operations: float
    by_schedule: dict[str, float]


def hit_probability(num_experts: int, top_k: int, group: int) -> float:
    """That a token which chooses top_k of the experts, all alike, chooses one of a group."""
    if num_experts - group < top_k:
        return 1.0
    misses = (math.log((num_experts - group - choice) / (num_experts - choice)) for choice in range(top_k))
    return 1.0 - math.exp(sum(misses))


def active_experts(problem: Problem) -> float:
    """Local experts with at least one token."""
    p = problem
    return p.num_experts / p.num_devices * (1.0 - (1.0 - p.top_k / p.num_experts) ** p.num_tokens)


@cache
def busiest_link(shape: tuple[int, ...], devices_per_chip: int = 1) -> int:
    """(sender, receiver) pairs of devices whose messages cross the busiest link of a mesh, routed one dimension after the other."""
    chips = list(itertools.product(*map(range, shape)))
    load: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for sender, receiver in itertools.permutations(chips, 2):
        here = sender
        for axis, goal in enumerate(receiver):
            while here[axis] != goal:
                step = here[axis] + (1 if goal > here[axis] else -1)
                there = (*here[:axis], step, *here[axis + 1 :])
                load[here, there] = load.get((here, there), 0) + devices_per_chip**2
                here = there
    return max(load.values(), default=0)


@cache
def fewest_links(shape: tuple[int, ...]) -> int:
    """Links of the chip that has the fewest."""
    chips = itertools.product(*map(range, shape))
    return min(sum((place > 0) + (place < size - 1) for place, size in zip(chip, shape, strict=True)) for chip in chips)


def bound(problem: Problem, chip: Chip) -> Bound:
    """Raises: ValueError, for a slice that is not known."""
    p = problem
    active = active_experts(p)
    rows = p.num_tokens * p.top_k / p.num_devices
    matrix = 3 * p.hidden * p.intermediate
    weight_bytes = active * matrix * item_bytes(p.weights.weight)
    row, home = p.hidden * item_bytes(p.dispatch_type), p.hidden * item_bytes(p.combine_type)
    row_bytes = p.num_tokens * row + rows * (row + 2 * home)
    peak = chip.peak_ops[p.weights.activation]
    weights_seconds = weight_bytes / chip.hbm_bytes_per_second
    hbm = weights_seconds + row_bytes / chip.hbm_bytes_per_second
    products, all_tokens = rows * 2 * matrix / peak, active * p.num_tokens * 2 * matrix / peak

    shape = slice_grid(chip, p.num_devices)
    if shape is None:
        raise ValueError(f"no slice of {p.num_devices} {chip.name} devices is known")
    pairs, links, chips = busiest_link(shape, chip.devices_per_chip), fewest_links(shape), math.prod(shape)

    def direct(bytes_per_pair: float) -> float:
        return bytes_per_pair * pairs / chip.link_bytes_per_second

    def relayed(bytes_per_token: float) -> float:
        """Every chip receives what the others have, once."""
        if not links:
            return 0.0
        return (chips - 1) / chips * p.num_tokens * bytes_per_token / (links * chip.link_bytes_per_second)

    share = p.num_tokens / p.num_devices
    hit = hit_probability(p.num_experts, p.top_k, max(1, p.num_experts // p.num_devices))
    gather, scatter = relayed(row), relayed(p.hidden * 2)
    slots, dedup = direct(share * p.top_k / p.num_devices * home), direct(share * hit * row)
    copies = rows * ROW_COPY_SECONDS
    runs = p.num_experts * ROW_COPY_SECONDS
    sends = share * hit * (p.num_devices - 1) * ROW_COPY_SECONDS
    exchange_d = direct(share * row), direct(share * home)

    candidates = {
        "D": (sum(exchange_d), {"hbm": weights_seconds, "matrix unit": all_tokens}, {"links": sum(exchange_d)}),
        "push": (gather, {"hbm": hbm, "matrix unit": products, "links": slots, "row copies": copies + runs}, {"links": gather}),
        "rs": (gather + scatter / 4, {"hbm": hbm, "matrix unit": products, "links": scatter, "row copies": copies}, {"links": gather}),
        "dedup": (
            dedup / 4,
            {"hbm": hbm, "matrix unit": products, "links": dedup + slots, "row copies": copies + runs + sends},
            {},
        ),
    }  # fmt: skip
    seconds = {
        name: FIXED_SECONDS[name] + exposed + max(busy.values()) for name, (exposed, busy, _) in candidates.items()
    }
    best = min(seconds, key=lambda name: seconds[name])
    _, busy, exposed_parts = candidates[best]
    parts = {name: busy.get(name, 0.0) + exposed_parts.get(name, 0.0) for name in {**busy, **exposed_parts}}
    return Bound(
        best, seconds[best], max(parts, key=lambda name: parts[name]), parts, weight_bytes,
        weight_bytes if best == "D" else weight_bytes + row_bytes, rows * 2 * matrix, seconds,
    )  # fmt: skip
