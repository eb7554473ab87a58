"""What a layer is measured with: random weights and tokens, and routings as they may come. NumPy only."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.fused_moe_v2.quantise import pad, quantise

DRAWN_EXPERTS = 8
"""Experts whose weights are drawn and quantised. The others have the same columns in another order: models have more weights than it
would be pleasant to wait for."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens are spread over experts.

    Attributes:
      name: as in `Provenance.routing`.
      counts: how many tokens each expert had where it was seen; empty for a rule by name.
    """

    name: str
    counts: tuple[float, ...] = ()

    def likely(self, num_experts: int) -> np.ndarray:
        """f64[E], how likely experts are, up to a factor.

        Raises:
          ConfigError: counts of another number of experts.
        """
        if self.name == "uniform":
            return np.ones(num_experts)
        if self.name == "zipf1.0":  # popular experts lie anywhere
            return np.random.default_rng(0).permutation(1 / np.arange(1.0, num_experts + 1))
        if len(self.counts) != num_experts:
            raise ConfigError(f"--routing-counts has {len(self.counts)} counts, the layer {num_experts} experts.")
        return np.asarray(self.counts, np.float64)


ROUTINGS = (Routing("uniform"), Routing("zipf1.0"))
"""Those that are always measured."""


def captured(path: Path) -> Routing:
    """The routing of a file with a JSON list of the tokens that each expert had.

    Raises:
      ConfigError: it cannot be read, or is no such list.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--routing-counts {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"--routing-counts {path} is not JSON.") from None
    numbers = isinstance(read, list) and all(type(one) in (int, float) and 0 <= one < 1e18 for one in read)
    if not numbers or sum(one > 0 for one in read) < 1:
        raise ConfigError(f"--routing-counts {path} must hold a list of counts, one for each expert, not all 0.")
    counts = tuple(float(one) for one in read)
    return Routing(f"capture:{hashlib.sha256(json.dumps(counts).encode()).hexdigest()[:8]}", counts)


def expert_ids(problem: Problem, routing: Routing, seed: int = 0) -> np.ndarray:
    """i32[group tokens, K]: different experts for each token, -1 in padding rows and where too few experts are likely at all."""
    p = problem
    with np.errstate(divide="ignore"):
        scores = np.log(routing.likely(p.num_experts))
    # The largest of these are a draw without replacement.
    scores = scores + np.random.default_rng(seed).gumbel(size=(p.group_tokens, p.num_experts))
    ids = np.argpartition(-scores, p.top_k - 1, axis=1)[:, : p.top_k]
    ids = np.where(np.isneginf(np.take_along_axis(scores, ids, axis=1)), -1, ids)
    ids[p.num_tokens :] = -1
    return ids.astype(np.int32)


def tokens_and_weights(problem: Problem, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[group tokens, H] in the problem's dtype, and routing weights f32[group tokens, K] that add up to 1."""
    p, random = problem, np.random.default_rng(seed + 1)
    x = random.standard_normal((p.group_tokens, p.hidden), np.float32).astype(np.dtype(p.dtype))
    shares = np.exp(random.standard_normal((p.group_tokens, p.top_k), np.float32))
    return x, shares / shares.sum(axis=1, keepdims=True)


def expert_weights(problem: Problem, seed: int = 0) -> ExpertWeights:
    """NumPy arrays in the problem's format, padded, such that results are of the tokens' order of size. Every expert's differ."""
    p, random = problem, np.random.default_rng(seed + 2)
    drawn = min(p.num_experts, DRAWN_EXPERTS)

    def normal(deviation: float, *shape: int) -> np.ndarray:
        return np.float32(deviation) * random.standard_normal((drawn, *shape), np.float32)

    arrays: dict[str, Any] = {
        "gate_up": normal(p.hidden**-0.5, 2, p.hidden, p.intermediate),
        "down": normal(1.5 * p.intermediate**-0.5, p.intermediate, p.hidden),
    }
    if p.gate_up_bias:
        arrays["gate_up_bias"] = normal(0.2, 2, 1, p.intermediate)
    if p.down_bias:
        arrays["down_bias"] = normal(0.2, 1, p.hidden)
    few = quantise(ExpertWeights(**arrays), p.weights)
    every = {item.name: _spread(getattr(few, item.name), p.num_experts) for item in dataclasses.fields(ExpertWeights)}
    return pad(ExpertWeights(**every), p)


def _spread(array: Any, num_experts: int) -> Any:
    """Of a few experts' arrays those of all: the columns, the last axis, moved on by a step more each time round. Their scales move with them."""
    if array is None:
        return None
    few = np.asarray(array)
    every = np.empty((num_experts, *few.shape[1:]), few.dtype)
    for first in range(0, num_experts, len(few)):
        part = every[first : first + len(few)]
        part[...] = np.roll(few[: len(part)], first // len(few), axis=-1)
    return every


def sampled(num_tokens: int, count: int) -> np.ndarray:
    """Numbers of so many tokens, or of all, evenly spread and with the first and the last one."""
    return np.unique(np.linspace(0, num_tokens - 1, min(count, num_tokens)).astype(np.int64))


def norm_weight(problem: Problem, seed: int = 0) -> np.ndarray | None:
    """f32[H] where the problem has a post norm."""
    if problem.post_norm is None:
        return None
    return np.random.default_rng(seed + 3).normal(1.0, 0.2, problem.hidden).astype(np.float32)


def names(routings: Sequence[Routing]) -> str:
    """As in `Provenance.routing`."""
    return "|".join(routing.name for routing in routings)
