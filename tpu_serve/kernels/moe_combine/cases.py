"""Operations on layers of public models as problems: what compile checks and benchmarks are about."""

from __future__ import annotations

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.moe_combine.problem import BYTES, LANES, Operation, Problem, granule, round_up

__all__ = ["OPERATIONS", "Operation", "least_bytes", "operation", "problem"]

OPERATIONS: tuple[Operation, ...] = ("combine", "permute", "dots")


def operation(name: str) -> Operation:
    """The operation of this name.

    Raises:
      ValueError: there is none.
    """
    if name not in OPERATIONS:
        raise ValueError(f"operation {name!r} is unknown; known are {', '.join(OPERATIONS)}")
    return name


def problem(chip: Chip, operation: Operation, workload: str, num_tokens: int) -> Problem:
    """All tokens and all experts of a workload on one device, in bfloat16; `combine` with float32 weights, the others without any."""
    one = WORKLOADS[workload]
    rows = round_up(num_tokens * one.top_k, 32)
    weight = "float32" if operation == "combine" else None
    align = granule("bfloat16", chip)
    hidden = round_up(one.hidden, LANES)
    return Problem(num_tokens, one.top_k, one.num_experts, rows, hidden, "bfloat16", weight, align)


def least_bytes(problem: Problem) -> int:
    """Bytes of HBM that no implementation can spare: every row and every token once."""
    p = problem
    return (p.num_tokens * p.top_k + p.num_tokens) * p.hidden * BYTES[p.dtype]
