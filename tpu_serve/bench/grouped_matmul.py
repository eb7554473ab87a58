"""Grouped products on named workloads, as programs for the ahead-of-time compiler: the kernels, and `jax.lax.ragged_dot`."""

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
from tpu_serve.kernels.grouped_matmul import cases, forward, portable, visits, weight_gradient
from tpu_serve.kernels.grouped_matmul.config import Config, heuristic, max_visits
from tpu_serve.kernels.grouped_matmul.problem import Problem


def uniform_sizes(problem: Problem) -> np.ndarray:
    """i32[E]: as many rows for each expert, as nearly as that can be."""
    rows, experts = problem.rows, problem.experts
    return np.diff(np.arange(experts + 1) * rows // experts).astype(np.int32)


def program(
    devices: Sequence[Any],
    *,
    chip: str,
    workload: str,
    num_tokens: int,
    operation: str,
    backend: str = "tc",
    config: Mapping[str, int] | None = None,
) -> Program:
    """A target of `bench.compiled.report` on one device."""
    context = Context(TPU_CHIPS[chip])
    p = cases.problem(operation, workload, num_tokens)
    on_device = NamedSharding(Mesh(np.array(devices[:1]), ("only",)), PartitionSpec())

    def array(shape: Sequence[int], dtype: str = p.dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=on_device)

    inner, outer, sizes = array((p.rows, p.n_in)), array((p.rows, p.n_out)), array((p.experts,), "int32")
    weights = array((p.experts, p.num_matrices, p.n_in, p.n_out))
    arguments = {
        "forward": (inner, weights, sizes),
        "input_gradient": (outer, weights, sizes),
        "weight_gradient": (inner, outer, sizes),
    }[p.role]
    scalars: dict[str, dict[int, Any]] = {}
    if backend == "tc":
        cut = heuristic(p, context.chip) if config is None else Config(**config)
        scalars = {"grouped_": _tables(p, cut)}
        function = _kernel(p, cut, context)
    else:
        function = _portable(p)
    analytic = {"hbm_bytes": cases.least_bytes(p), "flops": cases.operations(p), "peak": p.dtype}
    return Program(function, list(arguments), scalars, analytic)


def _kernel(p: Problem, cut: Config, context: Context) -> Any:
    if p.role == "weight_gradient":
        return lambda inner, outer, sizes: weight_gradient.weight_gradient(
            p, cut, context, inner, outer[None], sizes, 0
        )
    return lambda rows, weights, sizes: forward.multiply(p, cut, context, rows[None], weights, sizes, 0)


def _portable(p: Problem) -> Any:
    def product(rows: Any, weights: Any, sizes: Any) -> Any:
        return portable.product(rows, weights, sizes, 0, None, p.activation, p.out_type)

    def shape(size: int) -> Any:
        return jax.ShapeDtypeStruct((p.rows, size), jnp.dtype(p.dtype))

    if p.role == "forward":
        return product
    if p.role == "input_gradient":
        return lambda rows, weights, sizes: jax.linear_transpose(
            lambda inner: product(inner, weights, sizes), shape(p.n_in)
        )(rows)
    matrices = jax.ShapeDtypeStruct((p.experts, 1, p.n_in, p.n_out), jnp.dtype(p.dtype))
    return lambda inner, outer, sizes: jax.linear_transpose(lambda weights: product(inner, weights, sizes), matrices)(
        outer
    )


def _tables(p: Problem, cut: Config) -> dict[int, Any]:
    """What the kernel reads from SMEM: the number of visits, which bounds its grid, and the tables."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = visits.list_visits(
            jnp.asarray(uniform_sizes(p)), 0, experts=p.experts, rows=p.rows, tile_rows=cut.tile_rows,
            length=max_visits(p, cut), with_empty=p.role == "weight_gradient",
        )  # fmt: skip
    tables: tuple[jax.Array, ...] = made
    if p.role == "weight_gradient":  # which needs no order of the groups
        tables = (made.tile, made.group, made.begin, made.end, made.counts)
    return {0: int(made.counts[0]), **{index + 1: np.asarray(table) for index, table in enumerate(tables)}}
