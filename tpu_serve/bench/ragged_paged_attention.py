"""Attention of layers of public models as programs for the ahead-of-time compiler: the share of one device, on that device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.bench.compiled.program import Program
from tpu_serve.bench.models.operands import attention_scalars
from tpu_serve.bench.models.step import Step
from tpu_serve.device.batch import Batch
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.ragged_paged_attention import cases
from tpu_serve.kernels.ragged_paged_attention.config import Config
from tpu_serve.kernels.ragged_paged_attention.op import ragged_paged_attention
from tpu_serve.kernels.ragged_paged_attention.problem import BYTES, Problem
from tpu_serve.runner.pack import PackLayout

NUM_PAGES = 2000
MAX_PAGES = 64


def problem(workload: str, num_devices: int, step: Step, stored: str | None = None) -> Problem:
    """A layer's share of one of `num_devices` devices in a step."""
    return cases.problem(workload, num_devices, step.num_tokens, step.num_sequences, MAX_PAGES, stored)


def least(problem: Problem, step: Step) -> dict[str, Any]:
    """What no implementation can spare: every key and value that is seen read once, this step's written, queries read, results written;
    and the products of all pairs of a token and a key that it sees."""
    p = problem
    heads = p.num_tokens * p.num_heads * p.head_dim
    cached = (step.num_keys(p.window) + p.num_tokens) * p.num_kv_heads * p.lanes
    scales = 0 if p.stored is None else step.num_keys(p.window) * p.num_kv_heads * 2 * 4
    return {
        "hbm_bytes": 2 * heads * BYTES[p.dtype] + cached * BYTES[p.cache_dtype] + scales,
        "flops": 4 * step.num_seen(p.window) * p.num_heads * p.head_dim,
        "peak": p.dtype,
    }


def program(
    devices: Sequence[Any],
    *,
    chip: str,
    workload: str,
    num_tokens: int,
    phase: str,
    num_devices: int = 1,
    stored: str | None = None,
    config: Mapping[str, int] | None = None,
) -> Program:
    """A target of `bench.compiled.report` on one device."""
    step = Step.of(phase, num_tokens)
    p = problem(workload, num_devices, step, stored)
    on_device = NamedSharding(Mesh(np.array(devices[:1]), ("only",)), PartitionSpec())

    def array(shape: Sequence[int], dtype: str = p.dtype) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=on_device)

    def run(q: Any, k: Any, v: Any, values: Any, scale: Any, sinks: Any, fields: dict[str, Any]) -> Any:
        batch = Batch(**{item.name: None for item in dataclasses.fields(Batch)} | fields)
        cache = values if scale is None else QuantisedArray(values, scale)
        # As projections leave them, one token's heads side by side.
        q, k, v = (one.reshape(p.num_tokens, -1, p.head_dim) for one in (q, k, v))
        out, cache = ragged_paged_attention(
            q, k, v, cache, batch, p.head_dim**-0.5, context=Context(TPU_CHIPS[chip]), window=p.window, sinks=sinks,
            config=None if config is None else Config(**config),
        )  # fmt: skip
        return out.reshape(p.num_tokens, -1), cache

    layout = PackLayout(p.num_tokens, p.num_rows, p.max_pages, p.page_size, p.num_rows)
    names = ("page_table", "cu_q_lens", "kv_lens", "kv_index", "num_tokens", "num_seqs")
    new = array((p.num_tokens, p.num_kv_heads * p.head_dim))
    arguments = [
        array((p.num_tokens, p.num_heads * p.head_dim)), new, new,
        array((NUM_PAGES, p.num_kv_heads, p.page_size, p.lanes), p.cache_dtype),
        None if stored is None else array((NUM_PAGES, p.num_kv_heads, 2, p.page_size), "float32"),
        array((p.num_heads,), "float32") if p.has_sinks else None,
        {name: array(layout.shapes()[name], "int32") for name in names},
    ]  # fmt: skip
    scalars = attention_scalars(step, layout, NUM_PAGES)
    return Program(run, arguments, scalars, least(p, step), {"donate_argnums": (3, 4)})
