"""Random inputs of the fused mixture-of-experts kernel, with the routings that are hard on it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.kernels.fused_moe_v2.quantise import pad, quantise

ROUTINGS = (
    "uniform",
    "skewed",
    "one expert",
    "one device",
    "idle device",
    "duplicates",
    "padding",
    "partial",
    "nothing",
)
"""What `make` knows:
  uniform: K different experts for each token, all equally likely.
  skewed: K different experts, expert e in proportion to 1 / (e + 1), as a popular few have most of the tokens.
  one expert: all tokens choose the same one; their other choices are -1.
  one device: only experts of the last device that has any; choices that it has no expert for are -1.
  idle device: no expert of the first device, -1 where too few remain.
  duplicates: uniform, but the last choice of every second token repeats its first, with a weight of its own.
  padding: uniform, but every third token and the last quarter of them have no expert, and NaN in x.
  partial: uniform, but each choice is -1 with probability 1/2.
  nothing: no token has an expert, and all of x is NaN.
Choices of -1 keep a routing weight, which nobody may use."""


@dataclass(frozen=True)
class Inputs:
    """NumPy arrays, true sizes except for the weights.

    Attributes:
      x: [T, H] in the problem's dtype.
      expert_ids: i32[T, K].
      routing_weights: f32[T, K], positive.
      weights: in the problem's format, padded, experts in order of devices.
      norm_weight: f32[H] where the problem has a post norm.
    """

    x: np.ndarray
    expert_ids: np.ndarray
    routing_weights: np.ndarray
    weights: ExpertWeights
    norm_weight: np.ndarray | None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `reference.dense` and `reference.strict` take after the problem."""
        return self.x, self.expert_ids, self.routing_weights, self.weights, self.norm_weight


def make(problem: Problem, seed: int = 0, routing: str = "uniform") -> Inputs:
    """Values such that tokens, inner values and results are all of order one, the same for the same arguments.

    Another routing or number of tokens leaves the weights as they are.
    """
    x_random, routing_random, weight_random, norm_random = (np.random.default_rng([seed, part]) for part in range(4))
    expert_ids = _expert_ids(problem, routing, routing_random)
    scores = np.exp(routing_random.normal(size=expert_ids.shape))
    x = x_random.normal(size=(problem.num_tokens, problem.hidden))
    if routing in ("padding", "nothing"):
        x[(expert_ids < 0).all(axis=1)] = np.nan
    norm_weight = None
    if problem.post_norm is not None:
        norm_weight = norm_random.normal(0.0 if problem.post_norm.plus_one else 1.0, 0.3, problem.hidden)
        norm_weight = norm_weight.astype(np.float32)
    return Inputs(
        x.astype(np.dtype(problem.dtype)),
        expert_ids.astype(np.int32),
        (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32),
        make_weights(problem, weight_random),
        norm_weight,
    )


def make_weights(problem: Problem, random: np.random.Generator) -> ExpertWeights:
    """Quantised and padded. Gate, up and their biases differ in size and sign, so that one taken for the other shows."""
    p = problem

    def normal(shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> np.ndarray:
        return (mean + deviation * random.standard_normal(shape, np.float32)).astype(np.float32)

    gate = normal((p.num_experts, p.hidden, p.intermediate), p.hidden**-0.5)
    up = normal((p.num_experts, p.hidden, p.intermediate), 1.5 * p.hidden**-0.5)
    down = normal((p.num_experts, p.intermediate, p.hidden), 1.5 * p.intermediate**-0.5)
    gate_bias = normal((p.num_experts, 1, p.intermediate), 0.2, mean=0.5)
    up_bias = normal((p.num_experts, 1, p.intermediate), 0.4, mean=-0.75)
    down_bias = normal((p.num_experts, 1, p.hidden), 0.3, mean=0.25)
    arrays: dict[str, Any] = {"gate_up": np.stack([gate, up], axis=1), "down": down}
    if p.gate_up_bias:
        arrays["gate_up_bias"] = np.stack([gate_bias, up_bias], axis=1)
    if p.down_bias:
        arrays["down_bias"] = down_bias
    return pad(quantise(ExpertWeights(**arrays), p.weights), p)


def _expert_ids(problem: Problem, routing: str, random: np.random.Generator) -> np.ndarray:
    p = problem
    likely = np.ones(p.num_experts)
    match routing:
        case "skewed":
            likely = 1 / np.arange(1, p.num_experts + 1)
        case "one device":
            last_device = (p.num_experts - 1) // p.local_experts
            likely[: last_device * p.local_experts] = 0
        case "idle device":
            likely[: p.local_experts] = 0
    ids = np.stack([_choices(likely, p.top_k, random) for _ in range(p.num_tokens)])
    match routing:
        case "uniform" | "skewed" | "one device" | "idle device":
            pass
        case "one expert":
            ids[:, 0] = random.integers(p.num_experts)
            ids[:, 1:] = -1
        case "duplicates":
            ids[::2, -1] = ids[::2, 0]
        case "padding":
            ids[::3] = -1
            ids[p.num_tokens - p.num_tokens // 4 :] = -1
        case "partial":
            ids[random.random(ids.shape) < 0.5] = -1
        case "nothing":
            ids[:] = -1
        case _:
            raise ValueError(f"routing {routing!r} is none of {', '.join(ROUTINGS)}")
    return ids


def _choices(likely: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Different experts in proportion to `likely`, -1 where too few have a chance."""
    possible = np.count_nonzero(likely)
    ids = random.choice(len(likely), min(count, possible), replace=False, p=likely / likely.sum()) if possible else []
    return np.concatenate([ids, np.full(count - len(ids), -1)]).astype(np.int64)
