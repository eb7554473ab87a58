"""Mode D: few tokens. Every token of the group runs through every active local expert, and its routing weight decides what counts.

No permutation: tokens and the float32 sum stay in VMEM, the weights of experts with at least one token stream through a ring, and one push at
the end brings each owner its partial sums, which it adds in a fixed order. README.md draws it.

Letters: G tokens of the group (`Problem.group_tokens`), R = G rounded up to whole vector registers, T own tokens, L x 128 a travelling row,
H padded hidden, E local experts, D devices.
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
from tpu_serve.kernels.collective_ids import CollectiveId
from tpu_serve.kernels.fused_moe_v2 import buffers, exchange, tile
from tpu_serve.kernels.fused_moe_v2.call import Call, scratch_of
from tpu_serve.kernels.fused_moe_v2.compact import CompactRows
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem, round_up
from tpu_serve.kernels.fused_moe_v2.ring import Ring, TileShape

F32 = jnp.float32


@dataclass(frozen=True)
class _Kernel:
    """The stages of the kernel, in the order in which they run."""

    problem: Problem
    config: Config
    shape: TileShape
    axis: str

    def __call__(
        self, active: Any, num_active: Any, counts: Any, inputs: dict[str, Any], out: Any, scratch: dict[str, Any]
    ) -> None:
        ring = Ring(self.shape, inputs["weights"], scratch["ring"])
        num_loads = num_active[0] * self.shape.per_expert
        for load in range(ring.num_slots):  # weights do not depend on the peers: they start before everyone has come
            self._refill(ring, active, jnp.int32(load), num_loads)
        small = [
            pltpu.make_async_copy(inputs[name], scratch[name], scratch["small_semaphore"])
            for name in ("coefficients", "row_scale", "norm_weight")
            if name in inputs
        ]
        for copy in small:
            copy.start()
        exchange.enter(self.axis, self.problem.num_devices)
        self._dispatch(inputs["x"], scratch)
        scratch["sum"][...] = jnp.zeros_like(scratch["sum"])
        for copy in small:
            copy.wait()
        self._arrive(scratch)
        compact = CompactRows(self.problem, self.config, scratch, counts) if self.config.compact_rows else None
        accumulate: Any = functools.partial(self._accumulate, scratch)
        if compact is not None:
            compact.prepare()
            accumulate = compact.accumulate
        jax.lax.fori_loop(0, num_loads, lambda load, _: self._step(ring, active, load, num_loads, accumulate), None)
        if compact is not None:
            compact.finish()
        if self.problem.sequence_parallel:
            # Own tokens have left: after the kernel their buffer is somebody else's.
            for _ in range(self.problem.num_devices):
                exchange.wait_bytes_of(inputs["x"], scratch["sent"].at[0])
        self._reduce(out, scratch)

    def _refill(self, ring: Ring, active: Any, load: Any, num_loads: Any) -> None:
        @pl.when(load < num_loads)
        def _() -> None:
            ring.start(load, active[load // self.shape.per_expert], jax.lax.rem(load, self.shape.per_expert))

    def _dispatch(self, x: Any, scratch: dict[str, Any]) -> None:
        """Own tokens into every peer's VMEM, at their place in the group. Without sequence parallelism everyone has them already."""
        p = self.problem
        if not p.sequence_parallel:
            pltpu.make_async_copy(x, scratch["rows"], scratch["arrived"].at[0]).start()
            return
        me = jax.lax.axis_index(self.axis)
        place = scratch["rows"].at[pl.ds(me * p.local_tokens, p.local_tokens)]
        for distance in range(p.num_devices):
            device = exchange.peer(self.axis, p.num_devices, distance)
            exchange.push(x, place, scratch["sent"].at[0], scratch["arrived"].at[0], self.axis, device)

    def _arrive(self, scratch: dict[str, Any]) -> None:
        """Waits for all tokens and brings them into the form in which they enter the products."""
        p = self.problem
        exchange.wait_bytes_of(scratch["rows"], scratch["arrived"].at[0])
        rows = self._padded(tile.flatten(scratch["rows"][...], p.padded_hidden))
        came_with = _as_column(scratch["row_scale"][...], 0, len(rows)) if "row_scale" in scratch else None
        values, scale = tile.from_wire(rows, came_with, p.dispatch_type, p.weights)
        scratch["activations"][...] = values
        if scale is not None:
            scratch["activation_scale"][...] = scale

    def _padded(self, rows: jax.Array) -> jax.Array:
        missing = round_up(len(rows), buffers.ROW_MULTIPLE) - len(rows)
        if not missing:
            return rows
        return jnp.concatenate([rows, jnp.zeros((missing, rows.shape[1]), rows.dtype)])

    def _step(self, ring: Ring, active: Any, load: Any, num_loads: Any, accumulate: Any) -> None:
        ring.wait(load)
        index = jax.lax.rem(load, self.shape.per_expert)
        accumulate(ring.tile(load), active[load // self.shape.per_expert], index)
        self._refill(ring, active, load + ring.num_slots, num_loads)

    def _accumulate(self, scratch: dict[str, Any], part: ExpertWeights, expert: Any, index: Any) -> None:
        """Adds what one tile of an expert contributes, some rows at a time."""
        size = buffers.mode_d_tile_rows(self.problem)

        def one(row_tile: Any, _: None) -> None:
            rows = pl.ds(pl.multiple_of(row_tile * size, size), size)
            self._accumulate_rows(rows, part, expert, index, scratch)

        jax.lax.fori_loop(0, scratch["sum"].shape[0] // size, one, None)

    def _coefficient(self, rows: Any, expert: Any, scratch: dict[str, Any]) -> jax.Array:
        """Routing weight of each row for this expert, f32[M, 1]; 0 where it is not routed there."""
        coefficients = scratch["coefficients"][rows]
        lane = jax.lax.broadcasted_iota(jnp.int32, coefficients.shape, 1)
        return jnp.sum(jnp.where(lane == expert, coefficients, 0.0), axis=1, keepdims=True)

    def _accumulate_rows(
        self, rows: Any, part: ExpertWeights, expert: Any, index: Any, scratch: dict[str, Any]
    ) -> None:
        """Rows that are not routed to the expert contribute zero, whatever they hold."""
        p = self.problem
        coefficient = self._coefficient(rows, expert, scratch)
        routed = coefficient != 0

        def weighted(done: jax.Array) -> jax.Array:
            # At the very end: 0 times an infinity in the expert's weights is NaN, in every token.
            return jnp.where(routed, done if p.scale_on_input else coefficient * done, 0.0)

        def store(columns: Any, hidden: jax.Array) -> None:
            scratch["hidden"][:, columns] = hidden.astype(scratch["hidden"].dtype)

        def add(columns: Any, done: jax.Array) -> None:
            if part.down_bias is not None:
                done = done + jnp.where(index == 0, part.down_bias[:, columns], 0.0)
            if p.post_norm is None:
                scratch["sum"][rows, columns] += weighted(done)
            else:
                before = scratch["expert_sum"][rows, columns]
                scratch["expert_sum"][rows, columns] = jnp.where(index == 0, done, before + done)

        activations = scratch["activations"].at[rows]
        row_scale = scratch["activation_scale"][rows] if "activation_scale" in scratch else None
        factor = coefficient if p.scale_on_input else None
        tile.inner(activations, row_scale, part, p.weights, p.activation, factor, store)
        values, scale = tile.to_activations(scratch["hidden"][...].astype(F32), p.weights)
        tile.outer(values, scale, part, p.weights, add)
        if p.post_norm is not None:
            norm = p.post_norm

            @pl.when(index == self.shape.per_expert - 1)
            def _() -> None:
                done = tile.normalise(scratch["expert_sum"][rows], norm, scratch["norm_weight"][...], p.hidden)
                scratch["sum"][rows] += weighted(done)

    def _reduce(self, out: Any, scratch: dict[str, Any]) -> None:
        """Partial sums to their owners, who add them in order of sender."""
        p = self.problem
        own = pl.ds(jax.lax.axis_index(self.axis) * p.local_tokens, p.local_tokens)
        total = scratch["sum"][: p.group_tokens]
        values, scale = tile.to_wire(total, p.combine_type)
        scratch["partial"][...] = tile.to_lanes(values, p.row_lanes)
        if scale is not None:
            scratch["partial_scale"][...] = _as_lanes(scale, scratch["partial_scale"].shape[1])
        me = jax.lax.axis_index(self.axis)
        for distance in range(p.num_devices):
            device = exchange.peer(self.axis, p.num_devices, distance)
            theirs = scratch["partial"].at[pl.ds(device * p.local_tokens, p.local_tokens)]
            self._send(1, theirs, scratch["partials"].at[me], device, scratch)
            if scale is not None:
                self._send(1, scratch["partial_scale"], scratch["partial_scales"].at[me], device, scratch)
        exchange.wait_bytes_of(scratch["partials"], scratch["arrived"].at[1])
        if scale is not None:
            exchange.wait_bytes_of(scratch["partial_scales"], scratch["arrived"].at[1])
        result = jnp.zeros((p.local_tokens, p.padded_hidden), F32)
        for sender in range(p.num_devices):
            rows = tile.flatten(scratch["partials"][sender], p.padded_hidden).astype(F32)
            if scale is not None:
                rows = rows * _as_column(scratch["partial_scales"][sender], me * p.local_tokens, p.local_tokens)
            result = result + rows
        if p.sequence_parallel:
            out[...] = result.astype(out.dtype)
        else:
            self._gather(result, own, out, scratch)
        exchange.wait_bytes_of(scratch["partial"], scratch["sent"].at[1])
        if scale is not None:
            for _ in range(p.num_devices):
                exchange.wait_bytes_of(scratch["partial_scale"], scratch["sent"].at[1])

    def _send(self, phase: int, source: Any, target: Any, device: Any, scratch: dict[str, Any]) -> None:
        exchange.push(source, target, scratch["sent"].at[phase], scratch["arrived"].at[phase], self.axis, device)

    def _gather(self, result: jax.Array, own: Any, out: Any, scratch: dict[str, Any]) -> None:
        """Finished tokens to everyone, where every device wants all of them."""
        p = self.problem
        values, scale = tile.to_wire(result, p.output_gather_type)
        scratch["finished"][...] = tile.to_lanes(values, p.row_lanes)
        if scale is not None:
            scratch["finished_scale"][...] = _as_lanes(scale, scratch["finished_scale"].shape[1])
        me = jax.lax.axis_index(self.axis)
        for distance in range(p.num_devices):
            device = exchange.peer(self.axis, p.num_devices, distance)
            self._send(2, scratch["finished"], scratch["gathered"].at[own], device, scratch)
            if scale is not None:
                self._send(2, scratch["finished_scale"], scratch["gathered_scales"].at[me], device, scratch)
        exchange.wait_bytes_of(scratch["gathered"], scratch["arrived"].at[2])
        if scale is not None:  # before any row is read: one semaphore counts rows and scales, in any order
            exchange.wait_bytes_of(scratch["gathered_scales"], scratch["arrived"].at[2])
        rows = tile.flatten(scratch["gathered"][...], p.padded_hidden)
        if scale is not None:
            columns = [_as_column(scratch["gathered_scales"][d], 0, p.local_tokens) for d in range(p.num_devices)]
            rows = rows.astype(F32) * jnp.concatenate(columns)
        out[...] = rows.astype(out.dtype)
        for _ in range(p.num_devices):
            exchange.wait_bytes_of(scratch["finished"], scratch["sent"].at[2])
            if scale is not None:
                exchange.wait_bytes_of(scratch["finished_scale"], scratch["sent"].at[2])


def _as_lanes(column: jax.Array, num_lanes: int) -> jax.Array:
    """f32[M, 1] as f32[1, N], 0 beyond M: scales of rows side by side travel in a few bytes a row."""
    shape = (column.shape[0], num_lanes)
    here = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(here, column, 0.0), axis=0, keepdims=True)


def _as_column(lanes: jax.Array, first: Any, num_rows: int) -> jax.Array:
    """f32[num_rows, 1] from f32[1, N], beginning at lane `first`."""
    shape = (num_rows, lanes.shape[1])
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return jnp.sum(jnp.where(lane == row + first, lanes, 0.0), axis=1, keepdims=True)


def run(
    problem: Problem,
    config: Config,
    call: Call,
    x: jax.Array,
    row_scale: jax.Array | None,
    coefficients: jax.Array,
    active: jax.Array,
    num_active: jax.Array,
    counts: jax.Array,
    weights: ExpertWeights,
    norm_weight: jax.Array | None,
) -> jax.Array:
    """Calls the kernel, inside `shard_map` over the call's axis.

    Args:
      x: own tokens [T, L, 128] in the dispatch type, or all of them [G, L, 128] without sequence parallelism.
      row_scale: f32[1, R] of all tokens where the dispatch type is an 8-bit one.
      coefficients: f32 of `buffers.coefficients_shape`, the routing weight of each row and local expert, 0 for none.
      active: i32[E] local experts with at least one token, first; num_active: i32[1]; counts: i32[E] tokens of each.
      norm_weight: f32[1, H] where the problem has a post norm.

    Returns:
      Finished own tokens [T, H], or all of them [G, H] without sequence parallelism, in the problem's dtype.
    """
    p = problem
    shape = TileShape.of(p, config)
    inputs: dict[str, Any] = {"x": x, "weights": weights, "coefficients": coefficients}
    if row_scale is not None:
        inputs["row_scale"] = row_scale
    if norm_weight is not None:
        inputs["norm_weight"] = norm_weight
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    num_rows = p.local_tokens if p.sequence_parallel else p.group_tokens
    return pl.pallas_call(
        _Kernel(p, config, shape, call.axis),
        out_shape=jax.ShapeDtypeStruct((num_rows, p.padded_hidden), jnp.dtype(p.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            in_specs=[jax.tree.map(lambda _: in_hbm, inputs)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=(scratch_of(buffers.mode_d(p, config)),),
        ),
        compiler_params=call.compiler_params(CollectiveId.FUSED_MOE_D, p.num_devices),
        interpret=call.interpret,
        name="fused_moe_d",
    )(active, num_active, counts, inputs)
