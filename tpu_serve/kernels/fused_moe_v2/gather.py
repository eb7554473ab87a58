"""Mode G's input side: which tokens a visit needs, and bringing their rows from HBM into VMEM one visit ahead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.fused_moe_v2.buffers import window_rows
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem
from tpu_serve.kernels.fused_moe_v2.tables import VISIT_FIELDS

UNROLL = 8
"""Rows whose copies are started in one piece of straight code, so that their address arithmetic overlaps."""


def unrolled_for(count: Any, read: Any, start: Any) -> None:
    """start(i, read(i)) for i below count, `UNROLL` of them per turn of the loop, and the rest one by one.

    All reads of a turn come first: the compiler keeps scalar reads and the starts of copies in their order.
    """

    def several(turn: Any, _: None) -> None:
        indices = [turn * UNROLL + step for step in range(UNROLL)]
        for index, value in [(index, read(index)) for index in indices]:
            start(index, value)

    turns = count // UNROLL
    jax.lax.fori_loop(0, turns, several, None)
    jax.lax.fori_loop(turns * UNROLL, count, lambda index, _: start(index, read(index)), None)


class Visits:
    """Reads the tables of `tables.kernel_tables` inside the kernel."""

    def __init__(self, problem: Problem, tables: dict[str, Any]) -> None:
        self._num_devices, self._tables = problem.num_devices, tables
        self._limit = tables["visits"].shape[0] // len(VISIT_FIELDS)
        self.count = tables["totals"][0]

    def field(self, name: str, visit: Any) -> Any:
        return self._tables["visits"][VISIT_FIELDS.index(name) * self._limit + visit]

    def piece(self, visit: Any, device: Any) -> tuple[Any, Any, Any, Any]:
        """The part of a visit that comes from one device.

        Returns:
          length (0 for none), its first row within the visit, its first place among the device's sorted slots, where its results go.
        """
        run = self.field("virtual", visit) * self._num_devices + device
        first = self.field("first_row", visit)
        run_first, run_count = self._tables["run_first"][run], self._tables["run_count"][run]
        low = jnp.maximum(first, run_first)
        high = jnp.minimum(first + self.field("num_rows", visit), run_first + run_count)
        within = low - run_first
        length = jnp.maximum(high - low, 0)
        return length, low - first, self._tables["run_start"][run] + within, self._tables["run_target"][run] + within


class Gather:
    """Two stages a visit, both by parity of the visit: the index windows (HBM to SMEM), then the rows (HBM to VMEM).

    Args:
      sorted_tokens: i32[D * S / 128 + window, 1, 128] in HBM; sorted_weights likewise or None.
      rows_in: tokens of the group [G, L, 128] in HBM.
    """

    def __init__(
        self,
        problem: Problem,
        config: Config,
        tables: dict[str, Any],
        inputs: dict[str, Any],
        rows_in: Any,
        scratch: dict[str, Any],
    ) -> None:
        self._problem, self._config, self._tables = problem, config, tables
        self._visits = Visits(problem, tables)
        self._inputs, self._rows_in, self._scratch = inputs, rows_in, scratch
        self._slot_rows = (inputs["sorted_tokens"].shape[0] - window_rows(config)) // problem.num_devices

    def _window_copies(self, visit: Any, device: Any, place: Any) -> list[Any]:
        first = device * self._slot_rows + place // LANES
        parity = jax.lax.rem(visit, 2)
        return [
            pltpu.make_async_copy(
                self._inputs[source].at[pl.ds(first, window_rows(self._config))],
                self._scratch[target].at[parity, device],
                self._scratch["window_semaphores"].at[parity],
            )
            for source, target in (("sorted_tokens", "token_window"), ("sorted_weights", "weight_window"))
            if target in self._scratch
        ]

    def _for_pieces(self, visit: Any, body: Any) -> None:
        for device in range(self._problem.num_devices):
            length, row, place, _ = self._visits.piece(visit, device)

            @pl.when(length > 0)
            def _(device: int = device, length: Any = length, row: Any = row, place: Any = place) -> None:
                body(device, length, row, place)

    def start_windows(self, visit: Any) -> None:
        def body(device: int, length: Any, row: Any, place: Any) -> None:
            for copy in self._window_copies(visit, device, place):
                copy.start()

        self._for_pieces(visit, body)

    def start_rows(self, visit: Any) -> None:
        """Waits for the visit's windows and starts one copy a row; where tokens are in VMEM, the rows are there at once."""
        parity = jax.lax.rem(visit, 2)

        def wait(device: int, length: Any, row: Any, place: Any) -> None:
            for copy in self._window_copies(visit, device, place):
                copy.wait()

        def start(device: int, length: Any, row: Any, place: Any) -> None:
            offset = jax.lax.rem(place, LANES)

            def token(index: Any) -> Any:
                at = offset + index
                return self._scratch["token_window"][parity, device, at // LANES, 0, jax.lax.rem(at, LANES)]

            def one(index: Any, token: Any) -> None:
                if self._config.resident:
                    place = self._scratch["rows"].at[parity, pl.ds(row + index, 1)]
                    place[...] = self._rows_in[pl.ds(token, 1)]
                    self._note_factor(parity, device, offset + index, row + index, token)
                    return
                pltpu.make_async_copy(
                    self._rows_in.at[pl.ds(token, 1)],
                    self._scratch["rows"].at[parity, pl.ds(row + index, 1)],
                    self._scratch["row_semaphores"].at[parity],
                ).start()
                self._note_factor(parity, device, offset + index, row + index, token)

            unrolled_for(length, token, one)

        self._for_pieces(visit, wait)
        self._for_pieces(visit, start)

    def _note_factor(self, parity: Any, device: int, at: Any, row: Any, token: Any) -> None:
        """Scales that multiply a whole row go from SMEM into a vector register row each."""
        if "token_scale" in self._scratch:
            scale = self._tables["token_scales"][token]
            self._scratch["token_scale"][parity, pl.ds(row, 1)] = jnp.full((1, LANES), scale, jnp.float32)
        if "weight_window" in self._scratch:
            weight = self._scratch["weight_window"][parity, device, at // LANES, 0, jax.lax.rem(at, LANES)]
            self._scratch["input_weight"][parity, pl.ds(row, 1)] = jnp.full((1, LANES), weight, jnp.float32)

    def wait_rows(self, visit: Any) -> None:
        if self._config.resident:
            return
        parity, count = jax.lax.rem(visit, 2), self._visits.field("num_rows", visit)
        rows = self._scratch["rows"].at[parity, pl.ds(0, count)]
        pltpu.make_async_copy(rows, rows, self._scratch["row_semaphores"].at[parity]).wait()
