"""Runs the fused mixture-of-experts kernel on simulated devices and compares it with the NumPy reference.

    check(Problem(...), Config(...), ("uniform", "padding"))

compiles the layer once and runs it on each routing with copies moved late and early, the race detector on.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fused_moe_inputs import Inputs, make
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from simulator import Mode, Simulation

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2 import reference, tolerance
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import Problem

AXIS = "model"
BOTH: tuple[Mode, ...] = ("on_wait", "eager")


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))


def tokens_spec(problem: Problem) -> P:
    """How tokens are split over the devices on their way in."""
    return P(AXIS) if problem.sequence_parallel else P()


def padded_arguments(problem: Problem, inputs: Inputs) -> tuple[Any, ...]:
    """Arguments of the layer for all devices. Where tokens are missing to a multiple of the devices, NaN without an expert."""
    p = problem
    missing = p.group_tokens - p.num_tokens if p.sequence_parallel else 0

    def pad(rows: np.ndarray, value: Any) -> jax.Array:
        return jnp.asarray(np.concatenate([rows, np.full((missing, rows.shape[1]), value, rows.dtype)]))

    return (
        pad(inputs.x, np.nan),
        pad(inputs.expert_ids, -1),
        pad(inputs.routing_weights, np.nan),
        jax.tree.map(jnp.asarray, inputs.weights),
        None if inputs.norm_weight is None else jnp.asarray(inputs.norm_weight),
    )


def on_devices(problem: Problem, config: Config, interpret: Any, arguments: tuple[Any, ...]) -> jax.Array:
    """The layer over all its devices, for `padded_arguments`.

    Returns:
      [G, H] of the group's tokens, or [D, T, H] without sequence parallelism: what each device says about all tokens.
    """
    p = problem
    layer = functools.partial(fused_moe_v2, problem=p, config=config, call=Call(AXIS, cpu_chip(), interpret))
    tokens = tokens_spec(p)
    stack = (lambda y: y) if p.sequence_parallel else (lambda y: y[None])
    return jax.shard_map(
        lambda *own: stack(layer(*own)),
        mesh=mesh_of(p.num_devices),
        in_specs=(tokens, tokens, tokens, P(AXIS), P()),
        out_specs=P(AXIS),
        check_vma=False,
    )(*arguments)


def tokens_of(problem: Problem, output: Any) -> np.ndarray:
    """f32[T, H] from what `on_devices` returned. Devices that have all tokens must agree on them to the bit."""
    rows = np.asarray(output).astype(np.float32)
    if not problem.sequence_parallel:
        for device in range(1, problem.num_devices):
            np.testing.assert_array_equal(rows[device], rows[0], err_msg=f"device {device} differs from device 0")
        rows = rows[0]
    return rows[: problem.num_tokens]


class Layer:
    """A problem and a config, compiled once."""

    def __init__(self, problem: Problem, config: Config) -> None:
        self.problem, self.config = problem, config
        self._simulation = Simulation(lambda interpret, *arguments: on_devices(problem, config, interpret, arguments))

    def run(self, inputs: Inputs, modes: Sequence[Mode] = BOTH, allow_nan: bool = False) -> list[np.ndarray]:
        """f32[T, H] for each way of moving copies; raises KernelFault at a fault."""
        arguments = padded_arguments(self.problem, inputs)
        outputs = self._simulation.run(*arguments, modes=modes, allow_nan=allow_nan)
        return [tokens_of(self.problem, output) for output in outputs]


def references(problem: Problem, config: Config, inputs: Inputs) -> dict[str, np.ndarray]:
    """f32[T, H] by name of the reference."""
    strict = reference.strict(problem, *inputs.arguments, tile_columns=config.tile_columns, mode=config.mode)
    return {"strict": strict, "dense": reference.dense(problem, *inputs.arguments)}


def limits(problem: Problem, name: str) -> tolerance.Errors:
    """What a result may differ by from a reference. `dense` rounds nothing, so one 8-bit wire costs as much as 8-bit products do."""
    accepted = tolerance.tolerance(problem, is_strict=name == "strict")
    if name == "strict" or ROW_LIMITS.keys().isdisjoint(_wires(problem)):
        return accepted
    rows, wire = tolerance.TOLERANCES["8-bit, dense"], tolerance.TOLERANCES["8-bit wire"]
    return tolerance.Errors(rows.max_error, rows.relative_l2 + wire.relative_l2, rows.cosine)


def _wires(problem: Problem) -> tuple[str, ...]:
    """Types in which values travel that would not have been rounded to them anyway."""
    form, dispatch = problem.weights, problem.dispatch_type
    there = (dispatch,) if dispatch != form.activation or form.group_scales else ()
    return (*there, problem.combine_type, problem.output_gather_type)


def compare(
    problem: Problem,
    config: Config,
    inputs: Inputs,
    result: np.ndarray,
    what: str,
    names: Sequence[str] = ("strict", "dense"),
) -> None:
    """Assert that a result is as near to the references as the format allows."""
    expected = references(problem, config, inputs)
    for name in names:
        found, accepted = tolerance.errors(result, expected[name]), limits(problem, name)
        assert found.within(accepted), f"{what}: {found} of {name}, accepted {accepted}"


def check(
    problem: Problem,
    config: Config,
    routings: Sequence[str] = ("uniform",),
    modes: Sequence[Mode] = BOTH,
) -> None:
    """Assert that the layer is right, free of faults and the same in all modes, for each routing of `fused_moe_inputs`."""
    layer = Layer(problem, config)
    for seed, routing in enumerate(routings):
        inputs = make(problem, seed, routing)
        results = layer.run(inputs, modes)
        for mode, result in zip(modes, results, strict=True):
            compare(problem, config, inputs, result, f"{routing}, copies {mode}")
            np.testing.assert_array_equal(result, results[0], err_msg=f"{routing}: {mode} differs from {modes[0]}")
