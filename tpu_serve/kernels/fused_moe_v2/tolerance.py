"""How far a result may be from the reference: error measures, and the accepted errors as data. NumPy only."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.problem import Problem


class Errors(NamedTuple):
    """How far a result is from a reference, or how far it may be. All NaN where one of them is not finite.

    Attributes:
      max_error: largest difference over the reference's largest magnitude.
      relative_l2: Euclidean norm of the difference over the reference's.
      cosine: of the angle between them, 1 for equal directions.
    """

    max_error: float
    relative_l2: float
    cosine: float

    def within(self, limits: Errors) -> bool:
        """Whether all three are accepted; NaN never is."""
        close = self.max_error <= limits.max_error and self.relative_l2 <= limits.relative_l2
        return close and self.cosine >= limits.cosine


TOLERANCES = {
    "float32": Errors(1e-5, 1e-6, -math.inf),
    "bfloat16": Errors(1e-2, 4e-3, 0.99999),
    "8-bit, strict": Errors(2e-2, 1e-2, 0.9999),
    "8-bit, dense": Errors(math.inf, 5e-2, 0.998),
    "4-bit": Errors(1.5e-2, 6e-3, 0.9999),
    "8-bit wire": Errors(1e-2, 2e-2, 0.999),
}
"""Accepted errors for random normal data, by what is compared: products in float32; in bfloat16; of 8-bit rows against `strict`, and against
`dense`; of 4-bit weights with bfloat16 rows. "8-bit wire" is for rows that also travel in 8 bits: added to both errors, and the least cosine."""


def tolerance(problem: Problem, *, is_strict: bool) -> Errors:
    """What the kernel's result may differ by from `strict` or from `dense`."""
    form = problem.weights
    wires = {problem.dtype, problem.combine_type, problem.output_gather_type}
    if problem.dispatch_type != form.activation or form.group_scales:  # else tokens travel as they are multiplied
        wires.add(problem.dispatch_type)
    if form.quantises_rows:
        kind = "8-bit, strict" if is_strict else "8-bit, dense"
    elif form.weight == "float4_e2m1fn":
        kind = "4-bit"
    else:
        kind = "bfloat16" if "bfloat16" in {form.activation, *wires} else "float32"
    limits, wire = TOLERANCES[kind], TOLERANCES["8-bit wire"]
    if not wires.intersection(ROW_LIMITS):
        return limits
    cosine = min(limits.cosine, wire.cosine)
    return Errors(limits.max_error + wire.max_error, limits.relative_l2 + wire.relative_l2, cosine)


def errors(result: np.ndarray, reference: np.ndarray) -> Errors:
    """Compares arrays of one shape in float64. Two zero arrays agree; a result that should have been zero has infinite errors."""
    result, reference = (np.asarray(array).astype(np.float64) for array in (result, reference))
    if result.shape != reference.shape:
        raise ValueError(f"result {result.shape} and reference {reference.shape} differ in shape")
    if not (np.isfinite(result).all() and np.isfinite(reference).all()):
        return Errors(math.nan, math.nan, math.nan)
    difference = result - reference
    if not difference.any():
        return Errors(0.0, 0.0, 1.0)
    length, norm = (float(np.linalg.norm(array)) for array in (result, reference))
    if norm == 0:
        return Errors(math.inf, math.inf, 0.0)
    largest = float(np.max(np.abs(difference)) / np.max(np.abs(reference)))
    cosine = float(np.vdot(result, reference)) / (length * norm) if length else 0.0
    return Errors(largest, float(np.linalg.norm(difference)) / norm, cosine)
