"""Which configs of a problem are tried, and in which order: coordinate descent from the heuristic's. Plain Python."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.config import COMBINES, DISPATCHES, Config
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic, tile_widths
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.tuner.estimate import estimate

MARGIN = 0.02
"""By so much of its score the heuristic's config must be beaten, or it stays."""

PRUNED_FROM = 1.15
"""Configs that are calculated to take longer than so many times the best that was tried are left out."""

TILE_ROWS = (32, 64, 128, 256)
BLOCKS = (1, 2, 3, 4, 6, 8)
"""Of tile_rows, what block_rows are."""
COMPACT_ROWS = (0, 32, 64, 128)


class Search:
    """Asked for one config at a time and told what came of it.

    The heuristic's config is the first. Then come neighbours of the best so far, which differ from it in one coordinate by one step. Every
    coordinate has its turn, the most promising by calculation first; the heuristic's config of the other mode is as good as a neighbour.
    All are legal, none comes twice.

    Args:
      limit: of configs, the heuristic's included, those that failed too.
      calculated: seconds of a config; lower ones come first, and see `PRUNED_FROM`.

    Attributes:
      first: the heuristic's config.
      pruned: legal neighbours that were left out.

    Raises:
      ValueError: no config is legal.
    """

    def __init__(
        self, problem: Problem, chip: Chip, limit: int, calculated: Callable[[Config], float] | None = None
    ) -> None:
        self.first = heuristic(problem, chip)
        self.pruned: set[Config] = set()
        self._problem, self._chip, self._limit = problem, chip, limit
        self._calculated = calculated or (lambda config: estimate(problem, config, chip).seconds)
        self._scores: dict[Config, float | None] = {}
        self._centre = self.first
        self._turns: Counter[str] = Counter()
        self._coordinate = ""

    def ask(self) -> Config | None:
        """The next config to try, None when there is no more."""
        if not self._scores:
            return self.first
        if len(self._scores) >= self._limit:
            return None
        worked = [self._calculated(config) for config, score in self._scores.items() if score is not None]
        most = PRUNED_FROM * min(worked, default=math.inf)
        nearby: dict[Config, tuple[int, float, str]] = {}
        for coordinate, config in self._nearby():
            if config in self._scores or config in nearby or check(self._problem, config, self._chip) is not None:
                continue
            seconds = self._calculated(config)
            if seconds <= most:
                nearby[config] = self._turns[coordinate], seconds, coordinate
                self.pruned.discard(config)
            else:
                self.pruned.add(config)
        if not nearby:
            return None
        asked = min(nearby, key=nearby.__getitem__)
        self._coordinate = nearby[asked][2]
        return asked

    def tell(self, config: Config, score: float | None) -> None:
        """Score of a config, lower is better; None where it does not work."""
        best = self._scores.get(self._centre)
        self._scores[config] = score
        self._turns[self._coordinate] += 1
        if score is not None and (best is None or score < best):
            self._centre = config
            self._turns.clear()

    def chosen(self, margin: float = MARGIN) -> Config | None:
        """The best config, which is the heuristic's unless that is beaten by the margin. None where none works."""
        scores = {config: score for config, score in self._scores.items() if score is not None}
        if not scores:
            return None
        best = min(scores, key=scores.__getitem__)
        if self.first in scores and scores[best] > (1 - margin) * scores[self.first]:
            return self.first
        return best

    def _nearby(self) -> Iterator[tuple[str, Config]]:
        for coordinate, found in neighbours(self._problem, self._centre).items():
            for config in found:
                yield coordinate, config
        try:
            yield "mode", heuristic(self._problem, self._chip, "G" if self.first.mode == "D" else "D")
        except ValueError:
            return


def neighbours(problem: Problem, config: Config) -> dict[str, list[Config]]:
    """By coordinate, the configs one step away, legal or not."""
    found = {
        "tile_columns": _other_widths(problem, config),
        "ring_slots": [
            dataclasses.replace(config, ring_slots=slots)
            for slots in _steps(_rings(config.tiles_per_expert(problem)), config.ring_slots)
        ],
    }
    if config.mode == "D":
        found["compact_rows"] = [
            dataclasses.replace(config, compact_rows=rows) for rows in _steps(COMPACT_ROWS, config.compact_rows)
        ]
        return found
    multiple = config.block_rows // config.tile_rows
    found["block_rows"] = [
        dataclasses.replace(config, block_rows=config.tile_rows * blocks) for blocks in _steps(BLOCKS, multiple)
    ]
    # The block stays about as large, or the products are as many.
    found["tile_rows"] = [
        dataclasses.replace(config, tile_rows=rows, block_rows=rows * blocks)
        for rows in _steps(TILE_ROWS, config.tile_rows)
        for blocks in sorted({max(1, config.block_rows // rows), multiple})
    ]
    found["resident"] = [dataclasses.replace(config, resident=not config.resident)]
    found["dispatch"] = [
        dataclasses.replace(config, dispatch=dispatch, rounds=1 if dispatch == "xla_ag" else config.rounds)
        for dispatch in DISPATCHES
        if dispatch != config.dispatch and problem.num_devices > 1
    ]
    found["combine"] = [
        dataclasses.replace(config, combine=combine)
        for combine in COMBINES
        if combine != config.combine and problem.num_devices > 1
    ]
    return found


def _other_widths(problem: Problem, config: Config) -> list[Config]:
    """Other tiles with as many slots, and, where whole experts stay in the ring, with slots for as many experts."""
    found = []
    experts = config.ring_slots // config.tiles_per_expert(problem)
    for width in _steps(sorted(tile_widths(problem)), config.tile_columns):
        slots = {config.ring_slots}
        if config.keeps_experts(problem):
            slots.add(max(2, experts * (problem.padded_intermediate // width)))
        found += [dataclasses.replace(config, tile_columns=width, ring_slots=number) for number in sorted(slots)]
    return found


def _rings(per_expert: int) -> list[int]:
    return sorted({slots for slots in (2, 3, 4, per_expert, per_expert + 1, 2 * per_expert) if slots >= 2})


def _steps(ladder: tuple[int, ...] | list[int], value: int) -> list[int]:
    """The next smaller and the next larger value."""
    smaller, larger = [one for one in ladder if one < value], [one for one in ladder if one > value]
    return smaller[-1:] + larger[:1]
