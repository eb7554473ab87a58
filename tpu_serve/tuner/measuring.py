"""Trying configs on the devices themselves: first whether the results are right, then how long a layer takes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.config import ParallelOptions
from tpu_serve.device.chip import Chip, chip_of
from tpu_serve.device.devices import take_devices
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.device.mesh import EXPERT_AXIS, expert_mesh, make_mesh
from tpu_serve.kernels.fused_moe_v2 import reference
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.fused_moe_v2.tolerance import Errors, errors, tolerance
from tpu_serve.layers.moe.backends import Ragged
from tpu_serve.layers.moe.expert import Expert
from tpu_serve.layers.moe.expert_parallel import ExpertParallel
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.moe.routing import Routing as Routed
from tpu_serve.layers.moe.timing import Timing, chained, time_calls
from tpu_serve.moe_plan.path import without_xla
from tpu_serve.tuner import inputs
from tpu_serve.tuner.inputs import ROUTINGS, Routing
from tpu_serve.tuner.process import Worker, WorkerFailed
from tpu_serve.tuner.trial import FAILED, MEASURED, REFUSED, WORKED, Task, Trial

CHECKED_TOKENS = 16
"""Of a step, that are compared with the reference, which goes through each of their experts in float64."""

SPLIT, WHOLE = PartitionSpec(EXPERT_AXIS), PartitionSpec()


class Measurer:
    """An `Executor` in this process. Programs are compiled for the devices, or simulated where those are CPUs.

    A score is the mean over the routings. The worst of them would always be the most skewed one, and the others would be measured for nothing.

    Args:
      devices: of which the first ones are taken, as many as a problem wants.
      repeats, calls: see `time_calls`.
    """

    kind = MEASURED

    def __init__(
        self, devices: Sequence[Any], chip: Chip, routings: Sequence[Routing] = ROUTINGS, repeats: int = 20,
        calls: int | None = None,
    ) -> None:  # fmt: skip
        self._devices, self._chip, self._routings = devices, chip, tuple(routings)
        self._time: Callable[..., Timing] = partial(time_calls, repeats=repeats, calls=calls)
        self._problem: Problem | None = None
        self._programs: dict[Config | None, Callable[..., Any]] = {}
        self._held: tuple[Problem, ExpertWeights, ExpertWeights] | None = None
        self._expected: dict[Any, np.ndarray] = {}
        self._checked: dict[Any, np.ndarray] = {}

    @property
    def routing(self) -> str:
        return inputs.names(self._routings)

    def run(self, task: Task) -> Trial:
        p = task.problem
        mesh = expert_mesh(make_mesh(self._devices[: p.num_devices]))
        if task.config is None and (reason := without_xla(p)) is not None:
            return Trial(REFUSED, reason)
        program = self._program(p, task.config, mesh)
        host, weights = self._weights(p, mesh)
        times: dict[str, Timing] = {}
        found: dict[str, Any] = {"errors": {}}
        for routing in self._routings:
            ids = inputs.expert_ids(p, routing)
            x, shares = inputs.tokens_and_weights(p)
            placed = [jax.device_put(array, NamedSharding(mesh, SPLIT)) for array in (x, ids, shares)]
            arguments = [*placed, weights]
            if p.post_norm is not None:
                arguments.append(jax.device_put(inputs.norm_weight(p), NamedSharding(mesh, WHOLE)))
            if task.config is not None:
                result = np.asarray(program(1, *arguments))[: p.num_tokens].astype(np.float32)
                reason, off = self._objection(task, routing, (x, ids, shares), host, result)
                found["errors"][routing.name] = off._asdict()
                if reason is not None:
                    return Trial(REFUSED, f"{routing.name} routing: {reason}", found=found)
            times[routing.name] = self._time(lambda number, given=arguments: program(number, *given))
        mean = sum(one.us for one in times.values()) / len(times)
        found |= {
            "us": {name: round(one.us, 3) for name, one in times.items()},
            "spread": round(max(one.spread for one in times.values()), 5),
            "iterations": sum(one.iterations for one in times.values()),
        }
        return Trial(WORKED, "", round(mean, 3), MEASURED, found)

    def close(self) -> None:
        self._held = None
        self._programs.clear()

    def _weights(self, p: Problem, mesh: Mesh) -> tuple[ExpertWeights, ExpertWeights]:
        """On the host and on the devices; kept while the layer stays the same. What is known of other layers is forgotten."""
        layer = dataclasses.replace(p, num_tokens=1)
        if self._held is None or self._held[0] != layer:
            self._held = None  # before others are made: both may not fit
            self._expected.clear()
            self._checked.clear()
            host = inputs.expert_weights(p)
            self._held = layer, host, jax.tree.map(lambda one: jax.device_put(one, NamedSharding(mesh, SPLIT)), host)
        return self._held[1:]

    def _program(self, p: Problem, config: Config | None, mesh: Mesh) -> Callable[..., Any]:
        """See `timing.chained`; kept while the problem stays the same, as the control is measured twice."""
        if self._problem != p:
            self._problem = p
            self._programs.clear()
            jax.clear_caches()
        if config not in self._programs:
            run = xla_layer(p, mesh, self._chip) if config is None else self._fused_layer(p, config, mesh)
            self._programs[config] = chained(run)
        return self._programs[config]

    def _fused_layer(self, p: Problem, config: Config, mesh: Mesh) -> Callable[..., Any]:
        interpret: Any = False if self._chip.is_tpu else pltpu.InterpretParams()
        call = Call(EXPERT_AXIS, self._chip, interpret)
        return jax.shard_map(
            lambda *arrays: fused_moe_v2(*arrays, problem=p, config=config, call=call),
            mesh=mesh,
            in_specs=(SPLIT, SPLIT, SPLIT, SPLIT, *([WHOLE] if p.post_norm is not None else [])),
            out_specs=SPLIT,
            check_vma=False,
        )

    def _objection(
        self, task: Task, routing: Routing, arrays: tuple[np.ndarray, ...], weights: ExpertWeights, result: np.ndarray
    ) -> tuple[str | None, Errors]:
        """Why a result [T, H] is wrong, or None; and how far it is from the reference.

        Some tokens are compared with the reference. All are compared with the first result that passed that, which as another config's
        may round otherwise: both may be off by as much as is accepted of one.
        """
        p, config = task.problem, task.config
        assert config is not None
        some = inputs.sampled(p.num_tokens, CHECKED_TOKENS)
        step = (routing, p.num_tokens)
        rounding = (step, config.mode, config.tile_columns)
        if rounding not in self._expected:
            few = dataclasses.replace(p, num_tokens=len(some))
            x, ids, shares = (array[some] for array in arrays)
            self._expected[rounding] = reference.strict(
                few,
                x,
                ids,
                shares,
                weights,
                inputs.norm_weight(p),
                tile_columns=config.tile_columns,
                mode=config.mode,
            )
        off, limits = errors(result[some], self._expected[rounding]), tolerance(p, is_strict=True)
        if not off.within(limits):
            return f"the result is wrong: {_shown(off)} of the reference, accepted are {_shown(limits)}", off
        loose = tolerance(p, is_strict=False)
        between = Errors(2 * loose.max_error, 2 * loose.relative_l2, 1 - 4 * (1 - loose.cosine))
        others = errors(result, self._checked.get(step, result))
        if not others.within(between):
            return f"the result is wrong: {_shown(others)} of another config's, accepted are {_shown(between)}", off
        self._checked.setdefault(step, result)  # not before: one with NaN would be what all others are compared with
        return None, off


def _shown(found: Errors) -> str:
    return f"maximum {found.max_error:.2g}, L2 {found.relative_l2:.2g}, cosine {found.cosine:.6f}"


def xla_layer(problem: Problem, mesh: Mesh, chip: Chip) -> Callable[..., Any]:
    """What the server would run instead, for tokens that lie as the fused layer wants them: each device's own, before and after."""
    p = problem
    local = Ragged(chip.is_tpu, Expert(p.activation, p.format if p.weights.scaled else None))
    backend = local if p.num_devices == 1 else ExpertParallel(local, mesh)
    config = MoEConfig(p.num_experts, p.top_k, p.hidden, p.intermediate, renormalise=False)
    assert backend.supports(config, chip) is None
    split = NamedSharding(mesh, SPLIT)

    def run(x: jax.Array, ids: jax.Array, shares: jax.Array, weights: ExpertWeights) -> jax.Array:
        wide = jnp.pad(x, ((0, 0), (0, p.padded_hidden - p.hidden)))
        result = backend(wide, Routed(jnp.where(ids < 0, 0.0, shares), ids), weights)[:, : p.hidden]
        return jax.lax.with_sharding_constraint(result, split)

    return run


def handler(
    routings: Sequence[tuple[str, Sequence[float]]], repeats: int, calls: int | None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """In a process of its own, which has the devices: measures tasks, one after the other, and says which devices there are."""
    take_devices(ParallelOptions())  # does not look for a TPU where none can be
    devices = jax.local_devices()
    chip = chip_of(devices[0])
    measurer = Measurer(devices, chip, [Routing(name, tuple(counts)) for name, counts in routings], repeats, calls)

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        if not request:
            return {"platform": devices[0].platform, "chip": chip.name, "count": len(devices)}
        return dataclasses.asdict(measurer.run(Task.of_json(request)))

    return answer


class Measure:
    """An `Executor` that measures in a process of its own: only that one has the TPU.

    Args:
      timeout_s: for one config.
      routings, repeats, calls: see `Measurer`.
      stop: see `Worker`.
      environment: of the process.
    """

    kind = MEASURED

    def __init__(
        self, timeout_s: float, routings: Sequence[Routing] = ROUTINGS, repeats: int = 20, calls: int | None = None,
        stop: threading.Event | None = None, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.routing = inputs.names(routings)
        self._timeout_s = timeout_s
        arguments = {"routings": [(one.name, one.counts) for one in routings], "repeats": repeats, "calls": calls}
        self._worker = Worker(f"{__name__}:handler", arguments, environment or {}, stop)

    def devices(self) -> tuple[str, str, int]:
        """Platform, chip and number of the devices there are.

        Raises:
          ConfigError: none can be used.
        """
        try:
            found = self._worker.ask({}, self._timeout_s)
        except WorkerFailed as error:
            raise AssertionError(f"the process said {error}") from None
        return found["platform"], found["chip"], found["count"]

    def run(self, task: Task) -> Trial:
        try:
            return Trial(**self._worker.ask(task.as_json(), self._timeout_s))
        except WorkerFailed as error:
            return Trial(FAILED, str(error))

    def close(self) -> None:
        self._worker.close()
