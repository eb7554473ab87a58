"""Bytes that a path is expected to move on one device. Calculated, for uniform routing; copies that a compiler adds are not in it."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.kernels.fused_moe_v2.bound import active_experts, hit_probability
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem, ceil_div, item_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """
    Attributes:
      hbm_bytes: read and written in the device's memory.
      ici_bytes: sent to other devices.
    """

    hbm_bytes: int
    ici_bytes: int


def expert_bytes(problem: Problem) -> float:
    """Weights and scales of one expert as they are stored, padding left out."""
    p, weights = problem, problem.weights
    values = 3 * p.hidden * p.intermediate * item_bytes(weights.weight)
    if not weights.scaled:
        return values
    scales = 2 * weights.num_blocks(p.hidden) * p.intermediate + weights.num_blocks(p.intermediate) * p.hidden
    return values + 4 * scales


def fused_traffic(problem: Problem, config: Config) -> Traffic:
    """Of the fused kernel."""
    p = problem
    others, share = p.num_devices - 1, p.num_tokens / p.num_devices
    token, home = p.hidden * item_bytes(p.dispatch_type), p.hidden * item_bytes(p.combine_type)
    weights = active_experts(p) * expert_bytes(p)
    gathered = 0.0 if p.sequence_parallel else others * share * p.hidden * item_bytes(p.output_gather_type)
    if config.mode == "D":
        sent = others * share * (home + (token if p.sequence_parallel else 0.0))
        return Traffic(round(weights), round(sent + gathered))
    rows = p.num_tokens * p.top_k / p.num_devices
    of_round = ceil_div(p.num_tokens * p.top_k, p.num_experts * config.rounds)
    visits = config.rounds * (1 if config.keeps_experts(p) else ceil_div(of_round, config.block_rows))
    moved = rows * (token + 2 * home) + p.num_tokens * token
    hit = hit_probability(p.num_experts, p.top_k, max(1, p.num_experts // p.num_devices))
    dispatched = others * share * token * (hit if config.dispatch == "dedup_push" else 1.0)
    sent = rows * others / p.num_devices * home if config.combine == "push" else others * share * home
    if p.sequence_parallel:
        sent += dispatched
    return Traffic(round(weights * visits + moved), round(sent + gathered))


def xla_traffic(problem: Problem, path: str) -> Traffic:
    """Of a path for one device that runs on each of them with its own experts, the results summed in float32 over all.

    Quantised experts are widened first, all of them: read as they are stored, written in the type of the tokens, and read again as needed.
    """
    p, size = problem, item_bytes(problem.dtype)
    wide = 3 * p.hidden * p.intermediate * size
    widening = p.local_experts * (expert_bytes(p) + wide) if p.weights.scaled else 0.0
    read = wide if p.weights.scaled else expert_bytes(p)
    tokens, rows = p.num_tokens * p.hidden, p.num_tokens * p.top_k
    if path == "dense":
        experts = p.local_experts
        inner = p.num_tokens * experts * p.intermediate
        hbm = experts * read + size * (tokens + 6 * inner + 2 * p.num_tokens * experts * p.hidden)
    else:  # rows of other devices' experts are moved as well; only the products leave them out
        inner = rows * p.intermediate
        hbm = (
            active_experts(p) * read
            + size * (4 * rows * p.hidden + 2 * inner)
            + 4.0 * (4 * inner + 3 * rows * p.hidden)
        )
    total = (p.num_devices - 1) / p.num_devices
    sent = total * tokens * ((size + 4) if p.sequence_parallel else 2 * 4)
    return Traffic(round(widening + hbm), round(sent))
