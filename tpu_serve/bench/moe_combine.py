"""Permute and combine on named workloads, as programs for the ahead-of-time compiler: the kernels, and what XLA makes of the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.bench.compiled.program import Program
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import cases, gather, op, scatter, tables
from tpu_serve.kernels.moe_combine.problem import Config, Operation, Problem, heuristic


def uniform_ids(p: Problem, seed: int = 0) -> np.ndarray:
    """i32[T, K]: different experts for each token, all alike."""
    scores = np.random.default_rng(seed).random((p.num_tokens, p.num_experts))
    return np.argpartition(scores, p.top_k - 1, axis=1)[:, : p.top_k].astype(np.int32)


def program(
    devices: Sequence[Any],
    *,
    chip: str,
    workload: str,
    num_tokens: int,
    operation: Operation,
    backend: op.Backend = "tc",
    config: Mapping[str, int] | None = None,
) -> Program:
    """A target of `bench.compiled.report` on one device."""
    context = Context(TPU_CHIPS[chip])
    p = cases.problem(context.chip, operation, workload, num_tokens)
    on_device = NamedSharding(Mesh(np.array(devices[:1]), ("only",)), PartitionSpec())

    def array(shape: Sequence[int], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=on_device)

    rows, tokens = array((p.num_rows, p.hidden), p.dtype), array((p.num_tokens, p.hidden), p.dtype)
    ids, weights = array((p.num_tokens, p.top_k), "int32"), array((p.num_tokens, p.top_k), "float32")
    scalars: dict[str, dict[int, Any]] = {}
    if backend == "tc":
        cut = heuristic(p, context.chip, operation) if config is None else Config(**config)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            windows = np.asarray(tables.make(p, cut, jnp.asarray(uniform_ids(p))).windows)
        if operation == "permute":
            scalars = {
                "moe_combine_scatter": {
                    0: np.array([num_tokens * p.top_k], np.int32),
                    1: windows,
                    2: windows,
                    3: windows,
                }
            }
        else:
            scalars = {"moe_combine_(gather|dots)": {0: windows, 1: windows}}
        functions: dict[str, Any] = {
            "combine": lambda rows, ids, weights: gather.sums(p, cut, context, rows, ids, weights),
            "permute": lambda tokens, ids: scatter.scattered(p, cut, context, tokens, ids, None),
            "dots": lambda rows, ids, tokens: gather.dots(p, cut, context, rows, ids, tokens),
        }
    else:
        portable = op.portable_operations(backend)
        functions = {
            "combine": lambda rows, ids, weights: portable.sums(rows, ids, weights, p.num_experts, p.out_type),
            "permute": lambda tokens, ids: portable.scattered(tokens, ids, None, p.num_experts, p.num_rows),
            "dots": lambda rows, ids, tokens: portable.dots(rows, ids, tokens, p.num_experts),
        }
    arguments = {"combine": (rows, ids, weights), "permute": (tokens, ids), "dots": (rows, ids, tokens)}
    analytic = {"hbm_bytes": cases.least_bytes(p)}
    return Program(functions[operation], list(arguments[operation]), scalars, analytic)
