"""Mode G: many tokens. The rows of each expert are gathered, multiplied, and pushed home while the next ones are multiplied.

The kernel goes through the visits of `tables.py` with everything one visit ahead: index windows two visits before, rows one visit before,
weights by the ring, and finished rows leave while the next visit computes. README.md draws it.

The staged entries run the same body with stages switched off: "first" stops after the activation, "second" begins there.

Letters: G tokens of the group, L x 128 a travelling row, M rows of a visit (`block_rows`), H and I padded sizes, D devices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import exchange, tile
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.delivery import Delivery
from tpu_serve.kernels.fused_moe_v2.dispatch import Dispatch
from tpu_serve.kernels.fused_moe_v2.gather import Visits
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.fused_moe_v2.ring import Ring, TileShape

F32 = jnp.float32


@dataclass(frozen=True)
class Body:
    """The kernel's body. `stage` is "whole", "first" or "second"."""

    problem: Problem
    config: Config
    shape: TileShape
    axis: str
    stage: str

    def __call__(
        self, tables: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any], scratch: dict[str, Any]
    ) -> None:
        visits = Visits(self.problem, tables)
        ring = Ring(self.shape, inputs["weights"], scratch["ring"])
        for load in range(ring.num_slots):  # weights do not depend on the peers: they start before everyone has come
            self._refill(ring, tables, jnp.int32(load))
        if "norm_weight" in inputs:
            pltpu.sync_copy(inputs["norm_weight"], scratch["norm_weight"])
        source = self._source(tables, inputs, outputs, scratch)
        delivery = Delivery(self.problem, self.config, self.axis, tables, outputs, scratch)

        pl.when(visits.count > 0)(lambda: source.prepare(0))
        exchange.enter(self.axis, self.problem.num_devices)
        source.dispatch()

        pl.when(visits.count > 0)(lambda: source.start(0))
        pl.when(visits.count > 1)(lambda: source.prepare(1))

        def visit(index: Any, _: None) -> None:
            pl.when(index + 1 < visits.count)(lambda: source.start(index + 1))
            pl.when(index + 2 < visits.count)(lambda: source.prepare(index + 2))
            source.wait(index)
            self._compute(index, visits, ring, tables, scratch)
            self._finish(index, visits, delivery, scratch)

        jax.lax.fori_loop(0, visits.count, visit, None)
        source.drain()
        delivery.drain(visits.count)

    def _source(
        self, tables: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any], scratch: dict[str, Any]
    ) -> Any:
        if self.stage == "second":
            return InnerRows(inputs["inner"], scratch)
        return Dispatch(self.problem, self.config, self.axis, tables, inputs, outputs, scratch)

    def _refill(self, ring: Ring, tables: dict[str, Any], load: Any) -> None:
        @pl.when(load < tables["totals"][1])
        def _() -> None:
            expert = tables["loads"][load // self.shape.per_expert]
            ring.start(load, expert, jax.lax.rem(load, self.shape.per_expert))

    def _compute(self, visit: Any, visits: Visits, ring: Ring, tables: dict[str, Any], scratch: dict[str, Any]) -> None:
        num_tiles = pl.cdiv(visits.field("num_rows", visit), self.config.tile_rows)
        self._for_static_row_tiles(num_tiles, lambda rows: self._prepare_rows(visit, rows, scratch))
        first_load = visits.field("ordinal", visit) * self.shape.per_expert

        def columns(index: Any, _: None) -> None:
            load = first_load + index

            pl.when(visits.field("is_first", visit) == 1)(lambda: ring.wait(load))
            part = ring.tile(load)
            self._for_row_tiles(num_tiles, lambda rows: self._multiply(rows, visit, part, index, scratch))

            # The slot has been read for the last time.
            pl.when(visits.field("is_last", visit) == 1)(lambda: self._refill(ring, tables, load + ring.num_slots))

        jax.lax.fori_loop(0, self.shape.per_expert, columns, None)

    def _for_row_tiles(self, num_tiles: Any, body: Any) -> None:
        size = self.config.tile_rows

        def one(index: Any, _: None) -> None:
            body(pl.ds(pl.multiple_of(index * size, size), size))

        jax.lax.fori_loop(0, num_tiles, one, None)

    def _for_static_row_tiles(self, num_tiles: Any, body: Any) -> None:
        """The same with fixed places: the compiler turns travelling rows into flat ones as it loads them only where it knows the place."""
        size = self.config.tile_rows
        for index in range(self.config.block_rows // size):
            pl.when(index < num_tiles)(functools.partial(body, slice(index * size, (index + 1) * size)))

    def _prepare_rows(self, visit: Any, rows: Any, scratch: dict[str, Any]) -> None:
        """A tile of gathered rows in the form in which they enter the products, and their sum cleared."""
        p = self.problem
        if self.stage != "first":
            scratch["sum"][rows] = jnp.zeros((self.config.tile_rows, p.padded_hidden), F32)
        if self.stage == "second":
            return
        parity = jax.lax.rem(visit, 2)
        values = tile.flatten(scratch["rows"][parity, rows], p.padded_hidden)
        came_with = scratch["token_scale"][parity, rows, :1] if "token_scale" in scratch else None
        activations, scale = tile.from_wire(values, came_with, p.dispatch_type, p.weights)
        scratch["activations"][rows] = activations
        if scale is not None:
            scratch["activation_scale"][rows] = scale

    def _multiply(self, rows: Any, visit: Any, part: ExpertWeights, index: Any, scratch: dict[str, Any]) -> None:
        """One tile of rows through one tile of weights."""
        p = self.problem
        parity = jax.lax.rem(visit, 2)
        first_column = pl.multiple_of(index * self.shape.columns, 128)
        if self.stage == "second":
            hidden = scratch["inner"][parity, rows, pl.ds(first_column, self.shape.columns)]
        else:
            self._multiply_inner(rows, parity, first_column, part, scratch)
            if self.stage == "first":
                return
            hidden = scratch["hidden"][...]
        values, scale = tile.to_activations(hidden.astype(F32), p.weights)

        def add(columns: Any, done: jax.Array) -> None:
            if part.down_bias is not None:
                done = done + jnp.where(index == 0, part.down_bias[:, columns], 0.0)
            scratch["sum"][rows, columns] += done

        tile.outer(values, scale, part, p.weights, add)

    def _multiply_inner(
        self, rows: Any, parity: Any, first_column: Any, part: ExpertWeights, scratch: dict[str, Any]
    ) -> None:
        p = self.problem
        scale = scratch["activation_scale"][rows] if "activation_scale" in scratch else None
        factor = scratch["input_weight"][parity, rows, :1] if "input_weight" in scratch else None

        def store(columns: Any, hidden: jax.Array) -> None:
            if self.stage == "first":
                place = pl.ds(pl.multiple_of(first_column + columns.start, 128), columns.size)
                scratch["inner"][parity, rows, place] = hidden.astype(scratch["inner"].dtype)
            else:
                scratch["hidden"][:, columns] = hidden.astype(scratch["hidden"].dtype)

        tile.inner(scratch["activations"].at[rows], scale, part, p.weights, p.activation, factor, store)

    def _finish(self, visit: Any, visits: Visits, delivery: Delivery, scratch: dict[str, Any]) -> None:
        """Finished rows into the delivery buffer, and off."""
        if self.stage == "first":
            delivery.store_inner(visit)
            return
        delivery.reuse(visit)
        num_tiles = pl.cdiv(visits.field("num_rows", visit), self.config.tile_rows)
        self._for_static_row_tiles(num_tiles, lambda rows: self._encode(visit, rows, scratch))
        delivery.send(visit)

    def _encode(self, visit: Any, rows: Any, scratch: dict[str, Any]) -> None:
        p = self.problem
        parity = jax.lax.rem(visit, 2)
        values = scratch["sum"][rows]
        if p.post_norm is not None:
            values = tile.normalise(values, p.post_norm, scratch["norm_weight"][...], p.hidden)
        encoded, scale = tile.to_wire(values, p.combine_type)
        if scale is not None:
            scratch["done_scale"][parity, rows, 0] = jnp.broadcast_to(scale, (self.config.tile_rows, 128))
        scratch["done"][parity, rows] = tile.to_lanes(encoded, p.row_lanes)


class InnerRows:
    """Source of the second stage: activated rows of whole visits [N, M, I] in HBM, one visit ahead."""

    def __init__(self, inner: Any, scratch: dict[str, Any]) -> None:
        self._inner, self._scratch = inner, scratch

    def _copy(self, visit: Any) -> Any:
        parity = jax.lax.rem(visit, 2)
        return pltpu.make_async_copy(
            self._inner.at[visit], self._scratch["inner"].at[parity], self._scratch["row_semaphores"].at[parity]
        )

    def prepare(self, visit: Any) -> None:
        pass

    def dispatch(self) -> None:
        pass

    def start(self, visit: Any) -> None:
        self._copy(visit).start()

    def wait(self, visit: Any) -> None:
        self._copy(visit).wait()

    def drain(self) -> None:
        pass
