"""What the fused kernel must compute, in NumPy: expert by expert, in float64, without tiles, padding or devices that matter.

`dense` is the mathematics with the weights as stored. `strict` also rounds where a format or a wire type says that values are rounded, and
so differs from the kernel by the order of additions and by what that tips over a rounding boundary.

Letters: T tokens, K choices of a token, H hidden, I intermediate, R rows that go to one expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes  # noqa: F401  so that NumPy knows the small types by name
import numpy as np

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.problem import Activation, Problem
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise

Rounding = Callable[[np.ndarray], np.ndarray]
"""What is left of rows, [R, C] -> [R, C], after they were stored in fewer bits."""


def _unchanged(rows: np.ndarray) -> np.ndarray:
    return rows


@dataclass(frozen=True)
class _Roundings:
    """Where rows lose precision, in the order of the computation.

    Attributes:
      token: a token's row, before anything else.
      inner: what enters the second product.
      expert_row: an expert's finished row, before it is weighted.
      partial: a token's sum over one device's experts.
      finished: a token's sum over all devices.
    """

    token: Rounding = _unchanged
    inner: Rounding = _unchanged
    expert_row: Rounding = _unchanged
    partial: Rounding = _unchanged
    finished: Rounding = _unchanged


def dense(
    problem: Problem,
    x: np.ndarray,
    expert_ids: np.ndarray,
    routing_weights: np.ndarray,
    weights: ExpertWeights,
    norm_weight: np.ndarray | None = None,
) -> np.ndarray:
    """The layer's output with unrounded activations. All arguments may be padded at their ends; what is beyond the true sizes is not read.

    An id of -1 chooses nothing, nor does an expert whose routing weight is 0. A token that chooses an expert several times has the sum of
    those weights for it.

    Args:
      x: [T, H] of any floating type. Rows of tokens without an expert may hold anything.
      expert_ids: int[T, K].
      routing_weights: float[T, K].
      weights: in the problem's format.
      norm_weight: [H] where the problem has a post norm; dimensions of size 1 before it do not matter.

    Returns:
      f32[T, H].

    Raises:
      ValueError: an id beyond the experts, weights not in the problem's format, or a norm or bias that only one side knows of.
    """
    return _layer(problem, x, expert_ids, routing_weights, weights, norm_weight, _Roundings())


def strict(
    problem: Problem,
    x: np.ndarray,
    expert_ids: np.ndarray,
    routing_weights: np.ndarray,
    weights: ExpertWeights,
    norm_weight: np.ndarray | None = None,
    *,
    tile_columns: int,
    mode: str = "D",
) -> np.ndarray:
    """As `dense`, with activations rounded as format and wire types prescribe and the result rounded to the problem's dtype.

    8-bit formats have one scale per row for tokens and one per row and tile for the inner values, or one per row and block of columns for
    both where the format has `group_scales`. Other formats round both to their activation type. A routing weight on the input multiplies
    the first product, which a scale per row makes the same as multiplying the row before it is quantised.

    Args:
      tile_columns: intermediate columns that the kernel computes at a time, counted from column 0.
      mode: what travels back in `combine_type`. "D": a device's sum for a token; "G": an expert's row before it is weighted.

    Raises:
      ValueError: as `dense`, or an unknown mode.
    """
    if mode not in ("D", "G"):
        raise ValueError(f"mode is 'D' or 'G', not {mode!r}")
    form = problem.weights
    group = form.block if form.group_scales else None

    combine = lambda rows: rounded(rows, problem.combine_type)  # noqa: E731
    roundings = _Roundings(
        # Rows that travelled in the type of the products have the same values after the second rounding as after the first.
        token=lambda rows: rounded(rounded(rows, problem.dispatch_type), form.activation, group),
        inner=lambda rows: rounded(rows, form.activation, group or tile_columns),
        expert_row=combine if mode == "G" else _unchanged,
        partial=combine if mode == "D" else _unchanged,
        finished=lambda rows: rounded(_gathered(problem, rows), problem.dtype),
    )
    return _layer(problem, x, expert_ids, routing_weights, weights, norm_weight, roundings)


def _gathered(problem: Problem, rows: np.ndarray) -> np.ndarray:
    return rows if problem.sequence_parallel else rounded(rows, problem.output_gather_type)


def rounded(rows: np.ndarray, dtype: str, columns: int | None = None) -> np.ndarray:
    """Rows [R, C] as they are read back, in float64, after being stored in a type.

    8-bit types have a float32 scale per row and `columns` columns (None: per row), the largest magnitude over the type's largest. Where that
    magnitude is not finite, or so small that the scale would not be a normal number, zeros are stored.
    """
    rows = rows.astype(np.float32)
    if dtype not in ROW_LIMITS:
        return rows.astype(np.dtype(dtype)).astype(np.float64)
    limit, width = np.float32(ROW_LIMITS[dtype]), rows.shape[1]
    result = np.zeros(rows.shape)
    for first in range(0, width, columns or width):
        part = slice(first, first + (columns or width))
        peak = np.max(np.abs(rows[:, part]), axis=1, keepdims=True)
        scale = peak / limit
        usable = np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)
        # A product with the reciprocal, as on the device: a quotient tips other values over a rounding boundary, and two products with
        # another rounding between them make a hundredth of the result out of one value in a thousand.
        values = np.where(usable, rows[:, part], np.float32(0)) * (limit / np.where(usable, peak, limit))
        stored = np.rint(values) if dtype == "int8" else values.astype(np.dtype(dtype))
        result[:, part] = stored.astype(np.float64) * np.where(usable, scale, np.float32(0))
    return result


def _layer(
    problem: Problem,
    x: np.ndarray,
    expert_ids: np.ndarray,
    routing_weights: np.ndarray,
    weights: ExpertWeights,
    norm_weight: np.ndarray | None,
    roundings: _Roundings,
) -> np.ndarray:
    p = problem
    if (p.post_norm is None) != (norm_weight is None):
        raise ValueError(f"post_norm is {p.post_norm}, so norm_weight must{' not' * (p.post_norm is None)} be given")
    for name in ("gate_up_bias", "down_bias"):
        if (getattr(weights, name) is not None) != getattr(p, name):
            raise ValueError(f"{name} of the problem is {getattr(p, name)}, the weights say otherwise")
    if norm_weight is not None:
        norm_weight = np.asarray(norm_weight).astype(np.float64).reshape(-1)[: p.hidden]
    shares = _shares(p, np.asarray(expert_ids)[: p.num_tokens], np.asarray(routing_weights)[: p.num_tokens])
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN pass through, as on a device
        tokens = roundings.token(np.asarray(x)[: p.num_tokens, : p.hidden].astype(np.float64))
        total = np.zeros((p.num_tokens, p.hidden))
        for first in range(0, p.num_experts, p.local_experts):  # one device after the other
            partial = np.zeros_like(total)
            for expert in range(first, min(first + p.local_experts, p.num_experts)):
                here = np.flatnonzero(shares[:, expert])
                if not len(here):
                    continue
                share = shares[here, expert, None]
                rows = _rows_through(
                    p, _parameters(p, weights, expert), tokens[here], share, norm_weight, roundings.inner
                )
                rows = roundings.expert_row(rows)
                partial[here] += rows if p.scale_on_input else rows * share
            total += roundings.partial(partial)
        return roundings.finished(total).astype(np.float32)


def _shares(problem: Problem, expert_ids: np.ndarray, routing_weights: np.ndarray) -> np.ndarray:
    """Routing weight of each token for each expert, f64[T, E], 0 for none."""
    if expert_ids.max(initial=-1) >= problem.num_experts or expert_ids.min(initial=-1) < -1:
        raise ValueError(f"expert ids are -1 or below {problem.num_experts}")
    shares = np.zeros((problem.num_tokens, problem.num_experts))
    for token, choice in np.argwhere(expert_ids >= 0):
        shares[token, expert_ids[token, choice]] += routing_weights[token, choice]
    return shares


def _parameters(problem: Problem, weights: ExpertWeights, expert: int) -> tuple[np.ndarray, ...]:
    """One expert's gate and up [H, I], down [I, H], and biases [I], [I] and [H], zeros where there are none. All float64."""
    arrays = {item.name: getattr(weights, item.name) for item in fields(weights)}
    alone: dict[str, Any] = {
        name: None if array is None else array[expert : expert + 1] for name, array in arrays.items()
    }
    plain = dequantise(ExpertWeights(**alone), problem.weights)
    hidden, inner = problem.hidden, problem.intermediate
    gate, up = np.asarray(plain.gate_up)[0, :, :hidden, :inner].astype(np.float64)
    down = np.asarray(plain.down)[0, :inner, :hidden].astype(np.float64)
    gate_bias, up_bias, down_bias = np.zeros(inner), np.zeros(inner), np.zeros(hidden)
    if plain.gate_up_bias is not None:
        gate_bias, up_bias = np.asarray(plain.gate_up_bias)[0, :, 0, :inner].astype(np.float64)
    if plain.down_bias is not None:
        down_bias = np.asarray(plain.down_bias)[0, 0, :hidden].astype(np.float64)
    return gate, up, down, gate_bias, up_bias, down_bias


def _rows_through(
    problem: Problem,
    parameters: tuple[np.ndarray, ...],
    rows: np.ndarray,
    share: np.ndarray,
    norm_weight: np.ndarray | None,
    round_inner: Rounding,
) -> np.ndarray:
    """An expert's output [R, H] for rows [R, H] that are routed there with share [R, 1], which counts only where it is on the input."""
    factor = share if problem.scale_on_input else 1.0
    gate, up, down, gate_bias, up_bias, down_bias = parameters
    inner = activate(problem.activation, rows @ gate * factor + gate_bias, rows @ up * factor + up_bias)
    out = round_inner(inner) @ down + down_bias
    if problem.post_norm is None or norm_weight is None:
        return out
    mean_square = np.mean(out**2, axis=1, keepdims=True)
    normal = out / np.sqrt(mean_square + problem.post_norm.epsilon)
    return normal * (norm_weight + 1 if problem.post_norm.plus_one else norm_weight)


def activate(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The inner values of an expert from both halves of its first product."""
    match activation.name:
        case "silu":
            return gate * _sigmoid(gate) * up
        case "gelu":
            return gate * 0.5 * (1 + _erf(gate / math.sqrt(2))) * up
        case "gelu_tanh":
            return gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        case "swigluoai":
            gate = np.minimum(gate, activation.limit)
            up = np.clip(up, -activation.limit, activation.limit)
            return (up + 1) * gate * _sigmoid(activation.alpha * gate)
    raise ValueError(f"activation {activation.name!r} is unknown")


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-values))


def _erf(values: np.ndarray) -> np.ndarray:
    return np.frompyfunc(math.erf, 1, 1)(values).astype(np.float64)
