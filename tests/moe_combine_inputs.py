"""Routings, values and simulated runs for the tests of `moe_combine`. Letters as in `moe_combine_reference.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from simulator import Simulation

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import gather, scatter
from tpu_serve.kernels.moe_combine.problem import Config, Problem, round_up

ROUTINGS = ("uniform", "skewed", "few", "by block", "one", "none")


def routed(seed: int, num_tokens: int, top_k: int, num_experts: int, routing: str = "uniform") -> np.ndarray:
    """i32[T, K] expert ids. A token may choose an expert twice.

    Args:
      routing: "uniform"; "skewed": two thirds for expert 0; "few": one choice in ten has an expert; "partial": four in five; "by block": of
        every 72 tokens the middle third has none, and the others move on from expert to expert; "one": all alike; "none".
    """
    generator = np.random.default_rng(seed)
    shape = num_tokens, top_k
    ids = generator.integers(0, num_experts, shape)
    token = np.arange(num_tokens)[:, None]
    if routing == "skewed":
        ids = np.where(generator.random(shape) < 0.67, 0, ids)
    elif routing in ("few", "partial"):
        ids = np.where(generator.random(shape) < {"few": 0.9, "partial": 0.2}[routing], -1, ids)
    elif routing == "by block":
        ids = np.where(token // 24 % 3 == 1, -1, (ids + token // 16) % num_experts)
    elif routing == "one":
        ids = np.full(shape, generator.integers(num_experts))
    elif routing == "none":
        ids = np.full(shape, -1)
    else:
        assert routing == "uniform", routing
    return ids.astype(np.int32)


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


@dataclass(frozen=True)
class Case:
    """A problem and how it is cut; rows that every choice could have."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden: int
    panel: int
    routing: str = "partial"
    dtype: str = "bfloat16"
    weight_dtype: str | None = "float32"
    align: int = 16
    block_tokens: int = 128
    out_dtype: str | None = None
    row_lanes: int = 0
    spare_rows: int = 0

    @property
    def problem(self) -> Problem:
        rows = round_up(self.num_tokens * self.top_k, 32) + self.spare_rows
        return Problem(
            self.num_tokens, self.top_k, self.num_experts, rows, self.hidden, self.dtype, self.weight_dtype, self.align,
            self.out_dtype, self.row_lanes,
        )  # fmt: skip

    @property
    def config(self) -> Config:
        return Config(self.block_tokens, self.panel)

    def ids(self, seed: int = 0, routing: str | None = None) -> np.ndarray:
        return routed(seed, self.num_tokens, self.top_k, self.num_experts, routing or self.routing)

    def weights(self, seed: int = 1) -> np.ndarray | None:
        return None if self.weight_dtype is None else normal(seed, (self.num_tokens, self.top_k), self.weight_dtype)

    def rows(self, ids: np.ndarray, seed: int = 2) -> np.ndarray:
        """[R, H]: NaN behind the last choice's."""
        values = normal(seed, (self.problem.num_rows, self.hidden), self.dtype)
        values[np.sum(ids >= 0) :] = np.nan
        return values

    def tokens(self, seed: int = 3) -> np.ndarray:
        if self.dtype == "int8":
            return np.random.default_rng(seed).integers(-128, 128, (self.num_tokens, self.hidden)).astype(np.int8)
        return normal(seed, (self.num_tokens, self.hidden), self.dtype)


@functools.cache
def simulated(case: Case, operation: str, **options: Any) -> Simulation:
    """Of `gather.sums` (rows, ids, weights if any), `scatter.scattered` (tokens, ids, weights if any) or `gather.dots` (rows, ids, tokens)."""
    function: Callable[..., Any] = {"sums": gather.sums, "scattered": scatter.scattered, "dots": gather.dots}[operation]

    def run(interpret: Any, *arrays: Any) -> Any:
        padded = (*arrays, None) if len(arrays) == 2 else arrays
        return function(case.problem, case.config, Context(TPU_CHIPS["v6e"], interpret), *padded, **options)

    return Simulation(run)


def given(*arrays: np.ndarray | None) -> list[np.ndarray]:
    return [array for array in arrays if array is not None]


def bits(values: Any) -> np.ndarray:
    """The same memory as unsigned integers: what may differ nowhere, NaN included."""
    array = np.asarray(values)
    return array.view(f"u{array.dtype.itemsize}")
