"""Deliberate faults of the fused mixture-of-experts kernel: each is one small change, and says what must notice it.

`fused_moe_faults.py` plants them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fused_moe_faults as faults
import fused_moe_inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_moe_sum import sum_plainly
from jax.sharding import Mesh, PartitionSpec
from simulator import FaultKind, KernelFault, Mode, Simulation

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2 import (
    buffers,
    compact,
    delivery,
    dispatch,
    entries,
    gather,
    mode_d,
    mode_g,
    op,
    reference,
    ring,
    tables,
    tile,
    tolerance,
)
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import PostNorm, Problem

VALUES = "values"
"""Verdict on a run in which nothing but the result is wrong."""

RACE, SEMAPHORE, NAN = FaultKind.RACE, FaultKind.SEMAPHORE, FaultKind.NAN
DEADLOCK, ERROR = FaultKind.DEADLOCK, FaultKind.ERROR


@dataclass(frozen=True)
class Case:
    """A layer, how it is run, and its input. Small: the time goes into compiling the simulated kernel, not into its numbers."""

    problem: Problem
    config: Config
    routing: str = "uniform"
    in_two_stages: bool = False


def _problem(num_tokens: int, num_experts: int, num_devices: int, **fields: Any) -> Problem:
    """In float32, where a result that is rounded once too often shows."""
    sizes = {"top_k": 2, "hidden": 128, "intermediate": 256} | fields
    return Problem(
        num_tokens, num_experts, num_devices=num_devices, **({"format": "float32", "dtype": "float32"} | sizes)
    )


_BIASED = {"gate_up_bias": True, "down_bias": True}
_DENSE = _problem(8, 4, 2, **_BIASED)
_TWO_SLOTS = Config("D", 128, ring_slots=2)
_GATHER = Config("G", 128, ring_slots=2, block_rows=32, tile_rows=32)
_PUSH = Config("G", 128, ring_slots=2, block_rows=32, tile_rows=32, dispatch="push_ag", rounds=2)
_DEDUP = Config("G", 128, ring_slots=2, block_rows=32, tile_rows=32, dispatch="dedup_push")

CASES = {
    # Two devices of two experts of two tiles: four loads through two slots.
    "dense": Case(_DENSE, _TWO_SLOTS),
    "dense, choices missing": Case(_DENSE, _TWO_SLOTS, "partial"),
    "dense, NaN rows": Case(_DENSE, _TWO_SLOTS, "padding"),
    "dense, post norm": Case(_problem(8, 4, 2, hidden=100, post_norm=PostNorm(1e-5)), _TWO_SLOTS),
    "dense, 8-bit rows": Case(_problem(8, 4, 2, dispatch_dtype="int8", combine_dtype="int8"), _TWO_SLOTS),
    # Two experts of about 40 rows: two products each, and two tiles.
    "picked": Case(_problem(80, 2, 1, top_k=1, **_BIASED), Config("D", 128, ring_slots=2, compact_rows=32)),
    "picked, NaN rows": Case(_DENSE, Config("D", 128, ring_slots=2, compact_rows=32), "padding"),
    # One device of four experts: four visits, so that both buffers of a visit are used twice.
    "gather": Case(_problem(16, 4, 1, **_BIASED), _GATHER),
    # All rows at one expert, which takes two visits and has one tile more than the ring has slots.
    "gather, long expert": Case(_problem(40, 2, 1, top_k=1, intermediate=384), _GATHER, "one expert"),
    "push": Case(_problem(16, 4, 2), _PUSH),
    "push, choices missing": Case(_problem(16, 4, 2), _PUSH, "partial"),
    "dedup push": Case(_problem(16, 4, 2), _DEDUP),
    # One expert that takes three visits.
    "gather in two stages": Case(_problem(70, 1, 1, top_k=1), _GATHER, in_two_stages=True),
    "gather, 8-bit rows": Case(_problem(16, 4, 2, dispatch_dtype="int8"), _GATHER),
}


def arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """The arrays of a case as the layer takes them: with sequence parallelism, rows without an expert where tokens are missing."""
    p, inputs = case.problem, fused_moe_inputs.make(case.problem, seed, case.routing)
    missing = p.group_tokens - p.num_tokens if p.sequence_parallel else 0
    rows = (
        np.pad(inputs.x, ((0, missing), (0, 0))),
        np.pad(inputs.expert_ids, ((0, missing), (0, 0)), constant_values=-1),
        np.pad(inputs.routing_weights, ((0, missing), (0, 0))),
    )
    return jax.tree.map(jnp.asarray, (*rows, inputs.weights, inputs.norm_weight))


def one_layer(*arrays: Any, **settings: Any) -> Any:
    return op.fused_moe_v2(*arrays, **settings)


def staged(
    x: Any, expert_ids: Any, routing_weights: Any, weights: Any, norm_weight: Any = None, **settings: Any
) -> Any:
    """The same by the entries for half a layer each."""
    inner = entries.ag_gmm1(x, expert_ids, routing_weights, weights, **settings)
    return entries.gmm2_push(inner, expert_ids, routing_weights, weights, norm_weight, **settings)


def layer(case: Case, axis: str = "model", around: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The layer as `simulate` takes it.

    Args:
      axis: tells traces apart, because equal kernels over equal axes may be traced once only.
      around: called in place of the layer on each device, with the layer before its arguments.
    """
    problem = case.problem

    def kernel(interpret: Any, *arrays: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[: problem.num_devices]), (axis,))
        rows, everywhere = PartitionSpec(axis) if problem.sequence_parallel else PartitionSpec(), PartitionSpec()
        settings = {"problem": problem, "config": case.config, "call": Call(axis, cpu_chip(), interpret)}
        one_device = functools.partial(staged if case.in_two_stages else one_layer, **settings)
        if around is not None:
            one_device = functools.partial(around, one_device)
        specs = (rows, rows, rows, PartitionSpec(axis), everywhere)
        return jax.shard_map(one_device, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(*arrays)

    return kernel


@functools.cache
def expected(case: Case, seed: int = 0) -> np.ndarray:
    inputs = fused_moe_inputs.make(case.problem, seed, case.routing)
    config = case.config
    return reference.strict(case.problem, *inputs.arguments, tile_columns=config.tile_columns, mode=config.mode)


def wrong(case: Case, output: Any, seed: int = 0) -> tolerance.Errors | None:
    """The errors of a result that is further from the reference than it may be."""
    result = np.asarray(output)[: case.problem.num_tokens]
    found = tolerance.errors(result, expected(case, seed))
    return None if found.within(tolerance.tolerance(case.problem, is_strict=True)) else found


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
      name: what is wrong.
      case: of `CASES`, the smallest that shows it.
      plant: replaces what the fault changes.
      verdicts: what a run is to be found guilty of, by how copies are executed.
      says: part of the message of an `ERROR`, which might otherwise be one of the planting.
    """

    name: str
    case: str
    plant: faults.Plant
    verdicts: dict[Mode, Any]
    says: str = ""

    def verdict(self, mode: Mode) -> Any:
        """What a run of the mutant is found guilty of: a kind of fault, `VALUES`, or None when it survives.

        Raises:
          KernelFault: an error that does not say what it should.
        """
        case = CASES[self.case]
        with pytest.MonkeyPatch.context() as patch:
            sum_plainly(patch)
            self.plant(patch)
            try:
                (output,) = Simulation(layer(case, axis=self.name), timeout_seconds=20).run(
                    *arguments(case), modes=(mode,)
                )
            except KernelFault as fault:
                if fault.kind is ERROR and self.says not in fault.message:
                    raise
                return fault.kind
        return VALUES if wrong(case, output) else None


_BOTH_RACE: dict[Mode, Any] = {"on_wait": RACE, "eager": RACE}
_WRONG: dict[Mode, Any] = {"eager": VALUES}


MUTANTS = (
    # The ring.
    Mutant("D refills a slot before it is read", "dense", faults.refilled_too_early(mode_d._Kernel), _BOTH_RACE),
    Mutant("G refills a slot before it is read", "gather", faults.refilled_too_early(mode_g.Body), {"eager": RACE}),
    Mutant("biases have one slot", "dense", faults.replace(ring.Ring, "__init__", faults.biases_without_slots), {"on_wait": RACE}),
    Mutant("biases of the next expert", "dense", faults.replace(ring.TileShape, "part", faults.biases_of_the_next_expert), _WRONG),
    Mutant("every tile has the first one's biases", "dense", faults.argument(ring.TileShape, "part", "index", lambda i: i * 0), _WRONG),
    Mutant("gate and up are one slab", "dense", faults.replace(ring.Ring, "_copies", faults.one_slab_of_gate_and_up), _WRONG),
    Mutant("waits for half of gate and up", "dense", faults.replace(ring.Ring, "wait", faults.waits_for_half), {"on_wait": SEMAPHORE}),
    Mutant("waits for more than was started", "dense", faults.replace(ring.Ring, "wait", faults.waits_for_more), {"eager": DEADLOCK}),
    Mutant("slots of another tile size", "dense", faults.replace(buffers, "tile_shapes", faults.wider_tiles), {"eager": ERROR}, says="could not broadcast"),
    Mutant("keeps experts that the ring cannot hold", "gather, long expert", faults.replace(Config, "keeps_experts", lambda _: lambda *_: True), {"eager": DEADLOCK}),
    Mutant("tables and kernel disagree on the tiles of an expert", "gather", faults.replace(tables, "kernel_tables", faults.half_the_loads), {"eager": DEADLOCK}),
    Mutant("loads another expert", "gather", faults.replace(tables, "kernel_tables", faults.wrong_expert_loaded), _WRONG),
    # Entry, arrivals and sends.
    Mutant("D does not enter", "dense", faults.no_entry(), {"eager": RACE}),
    Mutant("D does not enter and has no collective id", "dense", faults.no_entry(Call), {"on_wait": RACE}),
    Mutant("G does not enter", "push", faults.no_entry(), {"on_wait": RACE}),
    Mutant("clears the delivery buffer after entry", "push", faults.replace(mode_g.Body, "_source", faults.zeros_after_entry), {"eager": RACE}),
    Mutant("D does not wait for tokens", "dense", faults.no_waits_on(mode_d._Kernel, "_arrive", "arrived"), {"eager": RACE}),
    Mutant("G does not wait for tokens", "push", faults.skip(dispatch.Dispatch, "_await_round"), {"eager": RACE}),
    Mutant("D does not wait for partial sums", "dense", faults.no_waits_on(mode_d._Kernel, "_reduce", "arrived"), {"eager": RACE}),
    Mutant("G does not wait for finished rows", "push", faults.skip(delivery, "wait_rows"), {"eager": RACE}),
    Mutant("D does not wait until partial sums have left", "dense", faults.no_waits_on(mode_d._Kernel, "_reduce", "sent"), {"eager": SEMAPHORE}),
    Mutant("G does not wait until finished rows have left", "push", faults.replace(delivery.Delivery, "drain", faults.drained_without_sends), {"eager": SEMAPHORE}),
    Mutant("G does not wait until tokens have left", "push", faults.replace(dispatch.Dispatch, "drain", faults.drained_without_tokens), {"eager": SEMAPHORE}),
    Mutant("overwrites finished rows that are leaving", "gather", faults.skip(delivery.Delivery, "reuse"), {"eager": RACE}),
    Mutant("overwrites activated rows that are leaving", "gather in two stages", faults.replace(delivery.Delivery, "store_inner", faults.inner_rows_overwritten), {"eager": RACE}),
    # Runs and windows.
    Mutant("a run begins one place late", "gather", faults.piece(place=lambda place: place + 1), _WRONG),
    Mutant("a run is one row short", "gather", faults.piece(length=lambda length: jnp.where(length > 1, length - 1, length)), {"eager": DEADLOCK}),
    Mutant("a run is delivered one place late", "gather", faults.piece(target=lambda target: target + 1), {"eager": ERROR}, says="Out-of-bounds write"),
    Mutant("a run of tokens is one short", "dedup push", faults.replace(tables, "dedup_runs", faults.shorter_runs), {"eager": DEADLOCK}),
    Mutant("windows of the wrong parity", "gather", faults.argument(gather.Gather, "_window_copies", "visit", lambda visit: visit + 1), {"eager": ERROR}, says="Out-of-bounds read"),
    # Values.
    Mutant("D sends missing choices to expert 0", "dense, choices missing", faults.argument(op, "_mode_d", "expert_ids", lambda ids: jnp.maximum(ids, 0)), _WRONG),
    Mutant("G sends missing choices to expert 0", "push, choices missing", faults.argument(op, "_mode_g", "expert_ids", lambda ids: jnp.maximum(ids, 0)), _WRONG),
    Mutant("D lets rows through that are not routed", "dense, NaN rows", faults.replace(mode_d._Kernel, "_coefficient", lambda original: lambda *given: jnp.maximum(original(*given), 1e-30)), {"eager": NAN}),
    Mutant("D picks no rows beyond the first product", "picked", faults.replace(compact.pl, "cdiv", lambda original: lambda a, b: original(a, b) * 0 + 1), _WRONG),
    Mutant("D picks another expert's rows", "picked", faults.argument(compact.CompactRows, "_pick", "expert", lambda expert: expert ^ 1), _WRONG),
    Mutant("D puts rows back in other rows' places", "picked", faults.argument(compact.CompactRows, "_places", "number", lambda number: number * 0), _WRONG),
    Mutant("D keeps sums of the first tile only", "picked", faults.argument(compact.CompactRows, "_multiply", "index", lambda index: index * 0), _WRONG),
    Mutant("D picks with rows that are not finite", "picked, NaN rows", faults.replace(compact, "where_finite", lambda _: lambda values, _: values), {"eager": NAN}),
    Mutant("D adds the down bias per tile", "dense", faults.argument(mode_d._Kernel, "_accumulate", "index", lambda index: index * 0), _WRONG),
    Mutant("G adds the down bias per tile", "gather", faults.argument(mode_g.Body, "_multiply", "index", lambda index: index * 0), _WRONG),
    Mutant("scales before it normalises", "dense, post norm", faults.replace(tile, "normalise", faults.scaled_before_normalised), _WRONG),
    Mutant("normalises over the padding too", "dense, post norm", faults.argument(tile, "normalise", "hidden", lambda _: 128), _WRONG),
    Mutant("tokens with another one's scale", "dense, 8-bit rows", faults.replace(op, "encode_tokens", faults.scales_of_the_next_row), _WRONG),
    Mutant("gathered rows with another one's scale", "gather, 8-bit rows", faults.argument(gather.Gather, "_note_factor", "token", lambda token: token ^ 1), _WRONG),
    Mutant("partial sums with another owner's scales", "dense, 8-bit rows", faults.argument(mode_d, "_as_column", "first", lambda first: first * 0), _WRONG),
)  # fmt: skip
