"""The fused kernel on named workloads, as programs for the ahead-of-time compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.bench.compiled.program import Program
from tpu_serve.bench.fused_moe_cells import chosen
from tpu_serve.device.chip import TPU_CHIPS, Chip
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import tables
from tpu_serve.kernels.fused_moe_v2.bound import active_experts, bound
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.legality import sum_by_windows
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2, in_windows
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.moe_combine import problem as moe_combine
from tpu_serve.kernels.moe_combine import tables as window_tables

AXIS = "model"


def config_of(problem: Problem, chip: Chip, changes: Mapping[str, Any]) -> Config:
    """The config that a server would run, or the rule's for the mode that `changes` may name, with the other fields that it names replaced.

    Raises:
      ValueError: there is none.
    """
    return dataclasses.replace(chosen(problem, chip, changes.get("mode")).config, **changes)


def abstract_arguments(problem: Problem, mesh: Mesh) -> tuple[list[Any], list[PartitionSpec]]:
    """Shapes and shardings of everything that `fused_moe_v2` takes, and how shard_map cuts it."""
    p, weights = problem, problem.weights
    experts, hidden, inner = p.local_experts * p.num_devices, p.padded_hidden, p.padded_intermediate
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    tokens = split if p.sequence_parallel else whole
    rows = p.group_tokens if p.sequence_parallel else p.num_tokens

    def array(shape: Sequence[int], dtype: str, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    def only_if(present: bool, shape: Sequence[int]) -> Any:
        return array(shape, "float32", split) if present else None

    held = ExpertWeights(
        array((experts, 2, hidden, inner), weights.weight, split),
        array((experts, inner, hidden), weights.weight, split),
        only_if(weights.scaled, (experts, 2, weights.scale_rows(hidden), inner)),
        only_if(weights.scaled, (experts, weights.num_blocks(inner), 1, hidden)),
        only_if(p.gate_up_bias, (experts, 2, 1, inner)),
        only_if(p.down_bias, (experts, 1, hidden)),
    )
    arguments: list[Any] = [
        array((rows, p.hidden), p.dtype, tokens),
        array((rows, p.top_k), "int32", tokens),
        array((rows, p.top_k), "float32", tokens),
        held,
    ]
    specs = [tokens, tokens, tokens, split]
    if p.post_norm is not None:
        arguments.append(array((p.hidden,), "float32", whole))
        specs.append(whole)
    return arguments, specs


def uniform_ids(problem: Problem, seed: int = 0) -> np.ndarray:
    """i32[D, T, K]: different experts for each token, all alike, and none for padding rows."""
    p = problem
    scores = np.random.default_rng(seed).random((p.group_tokens, p.num_experts))
    ids = np.argpartition(scores, p.top_k - 1, axis=1)[:, : p.top_k].astype(np.int32)
    ids[p.num_tokens :] = -1
    return ids.reshape(p.num_devices, p.local_tokens, p.top_k)


def scalars_of(problem: Problem, config: Config, chip: Chip) -> dict[str, dict[int, Any]]:
    """What device 0's kernel reads from SMEM for uniform routing, by operand."""
    p = problem
    if config.mode == "D":
        ids = uniform_ids(p)
        active = [expert for expert in range(p.local_experts) if (ids == expert).any()]
        listed = np.array(active + [e for e in range(p.local_experts) if e not in active], np.int32)
        counts = np.bincount(ids[(ids >= 0) & (ids < p.local_experts)].reshape(-1), minlength=p.local_experts)
        return {"fused_moe_d": {0: listed, 1: np.array([len(active)], np.int32), 2: counts.astype(np.int32)}}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        everyone = jax.vmap(lambda device, ids, weights: tables.sort_slots(p, device, ids, weights))(
            jnp.arange(p.num_devices, dtype=jnp.int32),
            jnp.asarray(uniform_ids(p)),
            jnp.ones((p.num_devices, p.local_tokens, p.top_k), jnp.float32),
        )
        scalars = tables.kernel_tables(p, config, jnp.int32(0), everyone)
        if config.dispatch == "dedup_push":
            scalars |= tables.dedup_runs(p, jnp.int32(0), everyone)
    operands: dict[str, Any] = {name: np.asarray(array) for name, array in scalars.items()}
    if p.dispatch_type in ROW_LIMITS:
        operands["token_scales"] = np.ones(p.group_tokens, np.float32).view(np.int32)
    ordered = [operands[name] for name in sorted(operands)]  # in the order of JAX's trees
    # Behind the tables come the inputs in HBM, the first of which is the norm's weight where there is one.
    tokens = len(ordered) + (p.post_norm is not None)
    return {
        "fused_moe_g": {**dict(enumerate(ordered)), tokens: np.asarray(in_windows(config, everyone.tokens))},
        **_sum_scalars(p, config, chip),
    }


def _sum_scalars(problem: Problem, config: Config, chip: Chip) -> dict[str, dict[int, Any]]:
    """What the final sum reads on device 0, where it goes by windows."""
    asked = sum_by_windows(problem, config, chip, problem.dtype)
    if asked is None:
        return {}
    cut = moe_combine.heuristic(asked, chip)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = window_tables.make(asked, cut, jnp.asarray(uniform_ids(problem)[0]))
    windows = np.asarray(made.windows)
    return {"moe_combine_gather": {0: windows, 1: windows}}


def layer(problem: Problem, config: Config, chip: Chip, devices: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The whole layer, metadata by XLA included, as a function to compile and its abstract arguments."""
    mesh = Mesh(np.array(devices), (AXIS,))
    arguments, specs = abstract_arguments(problem, mesh)
    function = jax.shard_map(
        lambda *arrays: fused_moe_v2(*arrays, problem=problem, config=config, call=Call(AXIS, chip)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=specs[0],
        check_vma=False,
    )
    return function, arguments


def program(
    devices: Sequence[Any],
    *,
    chip: str,
    workload: str,
    num_tokens: int,
    format: str,
    config: Mapping[str, Any] | None = None,
) -> Program:
    """A target of `bench.compiled.report`: the layer of a known model."""
    p = WORKLOADS[workload].problem(num_tokens, len(devices), format)
    return program_of(p, config_of(p, TPU_CHIPS[chip], config or {}), TPU_CHIPS[chip], devices)


def program_of(problem: Problem, config: Config, chip: Chip, devices: Sequence[Any]) -> Program:
    """The layer of any problem, with what its report is calculated from."""
    function, arguments = layer(problem, config, chip, devices)
    least = bound(problem, chip)
    analytic = {
        "flops": least.operations,
        "peak": problem.weights.activation,
        "hbm_bytes": least.hbm_bytes,
        "bound_us": least.seconds * 1e6,
        "schedule": least.schedule,
        "limit": least.limit,
        "active_experts": active_experts(problem),
    }
    return Program(function, arguments, scalars_of(problem, config, chip), analytic)
