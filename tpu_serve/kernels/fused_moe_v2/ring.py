"""A ring of weight tiles: what streams from HBM while the tiles before it are in use.

A slot holds everything of one tile of one expert (both projections, scales and biases), moved by one set of copies on one semaphore: what
is waited for together cannot be paired wrongly. Slot of load number n is n % num_slots. The one rule: `refill` after the slot's last read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import tile as math
from tpu_serve.kernels.fused_moe_v2.buffers import FIRST, WIDENED_ROWS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import Format
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem


@dataclass(frozen=True)
class TileShape:
    """Which part of an expert is a tile.

    Attributes:
      columns: F, of the intermediate dimension.
      per_expert: tiles of an expert.
    """

    columns: int
    per_expert: int
    weights: Format

    @classmethod
    def of(cls, problem: Problem, config: Config) -> TileShape:
        return cls(config.tile_columns, config.tiles_per_expert(problem), problem.weights)

    def part(self, field: str, array: Any, expert: Any, index: Any) -> Any:
        """Reference to tile `index` of an expert within the whole array of that field."""
        if field in FIRST:
            return array.at[expert, :, :, pl.ds(index * self.columns, self.columns)]
        if field == "down":
            return array.at[expert, pl.ds(index * self.columns, self.columns)]
        if field == "down_bias":
            return array.at[expert]
        first = index * self.columns // self.weights.block if self.weights.block else 0
        return array.at[expert, pl.ds(first, self.weights.num_blocks(self.columns))]


class Ring:
    """The ring inside a kernel.

    Args:
      weights: references to the device's whole weights in HBM.
      scratch: references to the buffers of `buffers.ring`.
    """

    def __init__(self, shape: TileShape, weights: ExpertWeights, scratch: dict[str, Any]) -> None:
        self.shape, self._weights = shape, weights
        self._slots, self._semaphores, self._wide = scratch["slots"], scratch["semaphores"], scratch.get("wide")
        self.num_slots: int = self._semaphores.shape[0]

    def _copies(self, load: Any, expert: Any, index: Any) -> list[Any]:
        slot = jax.lax.rem(load, self.num_slots)
        return [
            pltpu.make_async_copy(
                self.shape.part(field, getattr(self._weights, field), expert, index),
                buffer.at[slot],
                self._semaphores.at[slot],
            )
            for field, buffer in self._slots.items()
        ]

    def start(self, load: Any, expert: Any, index: Any) -> None:
        """Starts load number `load`: tile `index` of local expert `expert`. Its slot must not be read any more."""
        for copy in self._copies(load, expert, index):
            copy.start()

    def wait(self, load: Any) -> None:
        """Waits until a load that was started is there."""
        for copy in self._copies(load, 0, 0):  # a wait counts bytes; which tile it was does not matter
            copy.wait()

    def tile(self, load: Any) -> ExpertWeights:
        """References to the slot of a load that has been waited for, values widened where the format asks."""
        slot = jax.lax.rem(load, self.num_slots)
        parts = {field: buffer.at[slot] for field, buffer in self._slots.items()}
        if self._wide is not None:
            self._widen(parts)
            parts |= self._wide
        return ExpertWeights(**({"gate_up": None, "down": None} | parts))

    def _widen(self, parts: dict[str, Any]) -> None:
        assert self._wide is not None
        weights = self.shape.weights
        for field, wide in self._wide.items():
            for at in [(0,), (1,)] if field == "gate_up" else [()]:
                values, target = (reference.at[at] if at else reference for reference in (parts[field], wide))
                scale = parts[f"{field}_scale"].at[at] if at else parts[f"{field}_scale"].at[:, 0]

                def some(
                    first: Any, count: int, values: Any = values, target: Any = target, scale: Any = scale
                ) -> None:
                    rows = pl.ds(first, count)
                    blocks = None
                    if weights.block is not None and weights.block < LANES:
                        size = count // weights.block
                        blocks = scale[pl.ds(pl.multiple_of(first // weights.block, size), size)]
                    target[rows] = math.widened(values[rows], blocks, weights)

                _for_rows(values.shape[0], some)


def _for_rows(count: int, body: Any) -> None:
    """body(first, rows) over so many rows, `WIDENED_ROWS` at a time: whole tiles in float32 would take more VMEM than their slots."""
    whole = count // WIDENED_ROWS

    def one(index: Any, _: None) -> None:
        body(pl.multiple_of(index * WIDENED_ROWS, WIDENED_ROWS), WIDENED_ROWS)

    jax.lax.fori_loop(0, whole, one, None)
    if count % WIDENED_ROWS:
        body(whole * WIDENED_ROWS, count % WIDENED_ROWS)
