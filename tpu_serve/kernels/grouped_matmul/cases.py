"""Products of layers of public models as problems: what compile checks and benchmarks are about."""

from __future__ import annotations

from dataclasses import replace

from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.problem import LANES, item_bytes, round_up
from tpu_serve.kernels.grouped_matmul.problem import Problem

OPERATIONS = ("gate_up", "down", "input_gradient", "weight_gradient")
"""Both forward products of the experts, and the two gradients of the second."""


def problem(operation: str, workload: str, num_tokens: int) -> Problem:
    """All choices of all tokens and all experts of a workload on one device, in bfloat16."""
    one = WORKLOADS[workload]
    rows = round_up(num_tokens * one.top_k, 32)
    hidden, inner = (round_up(size, LANES) for size in (one.hidden, one.intermediate))
    if operation == "gate_up":
        return Problem(rows, one.num_experts, hidden, inner, num_matrices=2, activation=one.activation)
    down = Problem(rows, one.num_experts, inner, hidden)
    return down if operation == "down" else replace(down, role=operation)


def least_bytes(problem: Problem) -> int:
    """Bytes of HBM that no implementation can spare where every expert has rows: weights (or their gradient), rows and results once."""
    p = problem
    weights = p.experts * p.num_matrices * p.n_in * p.n_out
    return int((weights + p.rows * (p.n_in + p.n_out)) * item_bytes(p.dtype))


def operations(problem: Problem) -> float:
    """Multiplications and additions."""
    p = problem
    return 2.0 * p.rows * p.n_in * p.n_out * p.num_matrices
