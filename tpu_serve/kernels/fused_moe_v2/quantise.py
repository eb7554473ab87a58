"""Expert weights into the kernel's number formats and back, and out to its padded shapes. Plain NumPy, one matrix at a time.

Letters: E experts, H hidden, I intermediate; of one matrix K contraction rows, N columns, B blocks of rows that share a scale. Fields that
`ExpertWeights` calls arrays may be of NumPy or JAX here; what comes out is NumPy. A 4-bit value takes a byte in NumPy.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  so that NumPy knows the small types by name
import numpy as np

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS, Format
from tpu_serve.kernels.fused_moe_v2.problem import Problem

LARGEST = {**ROW_LIMITS, "float4_e2m1fn": 6.0}
"""Largest magnitude of each type that needs a scale."""

MICROSCALING_BLOCK = 32
"""Blocks of this size have powers of two as scales (OCP Microscaling Formats, MXFP4)."""

SQUARE_BLOCK = 128
"""In formats with blocks of this size as many columns share a scale as rows, as in checkpoints with `weight_block_size` [128, 128]."""

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


def quantise_matrix(matrix: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray | None]:
    """The nearest values that the format can hold, ties to even.

    Args:
      matrix: [K, N] of any floating type, rounded to float32 first.

    Returns:
      values [K, N] of `format.weight`; scale f32[B, N], or None where the format has none. The scale of a block is its largest magnitude
      over the type's largest, rounded down to a power of two for blocks of 32; an empty block has scale 1.

    Raises:
      ValueError: a value is not finite, in the matrix or in what would be stored.
    """
    matrix = np.asarray(matrix)
    if not format.scaled:
        values = matrix.astype(np.dtype(format.weight))
        if not np.isfinite(values).all():
            raise ValueError(f"weights must be finite in {format.weight}")
        return values, None
    matrix = matrix.astype(np.float32, copy=False)
    largest = _block_maximum(matrix, format)
    if not np.isfinite(largest).all():
        raise ValueError(f"weights must be finite to be quantised to {format.name}")
    scale = _scale(largest, format)
    return _rounded(matrix / _by_row(scale, format, len(matrix)), format.weight), scale


def _block_maximum(matrix: np.ndarray, format: Format) -> np.ndarray:
    """Largest magnitude among the values that share a scale, [B, N]."""
    num_rows, num_columns = matrix.shape
    magnitude = np.abs(matrix)
    largest = np.maximum.reduceat(magnitude, np.arange(0, num_rows, format.block or num_rows), axis=0)
    if format.block == SQUARE_BLOCK:
        squares = np.maximum.reduceat(largest, np.arange(0, num_columns, SQUARE_BLOCK), axis=1)
        largest = np.repeat(squares, SQUARE_BLOCK, axis=1)[:, :num_columns]
    return largest


def _scale(largest: np.ndarray, format: Format) -> np.ndarray:
    if format.block == MICROSCALING_BLOCK:
        # floor(log2(largest)) - 2, since 4 = 2^2 is the largest power of two in e2m1; frexp counts mantissas from 1/2.
        # float32 has no normal 2^-127, the smallest of e8m0.
        exponent = np.clip(np.frexp(largest)[1] - 1 - 2, -126, 127)
        scale = np.ldexp(np.float32(1), exponent)
    else:
        scale = np.maximum(largest / np.float32(LARGEST[format.weight]), _SMALLEST_NORMAL)
    return np.where(largest == 0, np.float32(1), scale)


def _rounded(matrix: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest value of the type, ties to even. Only 4-bit values can lie well beyond the largest, and their conversion saturates."""
    return (np.rint(matrix) if dtype == "int8" else matrix).astype(np.dtype(dtype))


def _by_row(scale: np.ndarray, format: Format, num_rows: int) -> np.ndarray:
    """Scales [B, N] as one that multiplies [K, N]."""
    return np.repeat(scale, format.block, axis=0)[:num_rows] if format.block else scale


def dequantise_matrix(values: np.ndarray, scale: np.ndarray | None, format: Format) -> np.ndarray:
    """f32[K, N] from values [K, N] and scale f32[B, N], None where the format has none."""
    matrix = np.asarray(values).astype(np.float32)
    return matrix if scale is None else matrix * _by_row(np.asarray(scale), format, len(matrix))


def quantise_stack(stack: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray | None]:
    """`quantise_matrix` of each: values [..., K, N] and scale f32[..., B, N] or None."""
    *leading, num_rows, num_columns = stack.shape
    values = np.empty(stack.shape, np.dtype(format.weight))
    scale = np.empty((*leading, format.num_blocks(num_rows), num_columns), np.float32) if format.scaled else None
    for index in np.ndindex(*leading):
        one_values, one_scale = quantise_matrix(stack[index], format)
        values[index] = one_values
        if scale is not None:
            scale[index] = one_scale
    return values, scale


def dequantise_stack(values: np.ndarray, scale: np.ndarray | None, format: Format) -> np.ndarray:
    """`dequantise_matrix` of each: f32[..., K, N]."""
    stack = np.empty(values.shape, np.float32)
    for index in np.ndindex(*values.shape[:-2]):
        stack[index] = dequantise_matrix(values[index], None if scale is None else scale[index], format)
    return stack


def quantise(weights: ExpertWeights, format: Format) -> ExpertWeights:
    """Unquantised weights in another format. Biases become float32.

    Raises:
      ValueError: the weights have scales already, or are not finite.
    """
    if weights.gate_up_scale is not None or weights.down_scale is not None:
        raise ValueError("weights with scales are quantised already; `requantise` changes their format")
    gate_up, gate_up_scale = quantise_stack(np.asarray(weights.gate_up), format)
    down, down_scale = quantise_stack(np.asarray(weights.down), format)
    return _with_biases_of(weights, gate_up, down, gate_up_scale, down_scale)


def dequantise(weights: ExpertWeights, format: Format) -> ExpertWeights:
    """Float32 weights without scales.

    Raises:
      ValueError: the weights are not of that format.
    """
    check(weights, format)
    gate_up_scale, down_scale = _scales(weights)
    gate_up = dequantise_stack(np.asarray(weights.gate_up), gate_up_scale, format)
    down = dequantise_stack(np.asarray(weights.down), down_scale, format)
    return _with_biases_of(weights, gate_up, down, None, None)


def requantise(weights: ExpertWeights, source: Format, target: Format) -> tuple[ExpertWeights, dict[str, float]]:
    """Weights of one format in another, and what that cost.

    Returns:
      The weights; for "gate", "up" and "down" the error of all experts' matrices, |new - old| / |old| in the Frobenius norm.

    Raises:
      ValueError: the weights are not of the source format.
    """
    check(weights, source)
    gate_up_scale, down_scale = _scales(weights)
    gate_up = np.asarray(weights.gate_up)
    new_gate_up, new_gate_up_scale, gate_up_errors = _requantise_stack(gate_up, gate_up_scale, source, target)
    new_down, new_down_scale, down_errors = _requantise_stack(
        np.asarray(weights.down)[:, None], None if down_scale is None else down_scale[:, None], source, target
    )
    new = _with_biases_of(
        weights,
        new_gate_up,
        new_down[:, 0],
        new_gate_up_scale,
        None if new_down_scale is None else new_down_scale[:, 0],
    )
    return new, dict(zip(("gate", "up", "down"), (*gate_up_errors, *down_errors), strict=True))


def _requantise_stack(
    values: np.ndarray, scale: np.ndarray | None, source: Format, target: Format
) -> tuple[np.ndarray, np.ndarray | None, list[float]]:
    """[E, S, K, N] and its scales in the target format, and one error for each of the S. Only one matrix at a time is float32."""
    num_experts, num_kinds, num_rows, num_columns = values.shape
    new = np.empty(values.shape, np.dtype(target.weight))
    new_scale = None
    if target.scaled:
        new_scale = np.empty((num_experts, num_kinds, target.num_blocks(num_rows), num_columns), np.float32)
    squares, differences = np.zeros(num_kinds), np.zeros(num_kinds)
    for expert, kind in np.ndindex(num_experts, num_kinds):
        at = (expert, kind)
        old = dequantise_matrix(values[at], None if scale is None else scale[at], source)
        one_values, one_scale = quantise_matrix(old, target)
        new[at] = one_values
        if new_scale is not None:
            new_scale[at] = one_scale
        difference = dequantise_matrix(one_values, one_scale, target) - old
        squares[kind] += np.sum(np.square(old, dtype=np.float64))
        differences[kind] += np.sum(np.square(difference, dtype=np.float64))
    return new, new_scale, [float(error) for error in np.sqrt(differences / np.where(squares == 0, 1, squares))]


def from_square_blocks(values: np.ndarray, scale_inv: np.ndarray, block: int = SQUARE_BLOCK) -> np.ndarray:
    """Scales of square blocks, as checkpoints store them, as scales of columns.

    Args:
      values: [K, N], contraction first, so a transposed checkpoint tensor [out, in].
      scale_inv: [ceil(K / block), ceil(N / block)] of any floating type, transposed with it; the factor that restores a value, its name
        in checkpoints (`weight_scale_inv`) notwithstanding.

    Returns:
      f32[ceil(K / block), N].

    Raises:
      ValueError: shapes that do not belong together.
    """
    num_rows, num_columns = values.shape
    expected = (-(-num_rows // block), -(-num_columns // block))
    if scale_inv.shape != expected:
        raise ValueError(f"values {values.shape} in blocks of {block} have scales {expected}, got {scale_inv.shape}")
    return np.repeat(np.asarray(scale_inv).astype(np.float32), block, axis=1)[:, :num_columns]


def _scales(weights: ExpertWeights) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Scales as those of stacks of matrices: f32[E, 2, B, I] and f32[E, B, H], or None."""
    if weights.gate_up_scale is None or weights.down_scale is None:
        return None, None
    return np.asarray(weights.gate_up_scale), np.asarray(weights.down_scale)[:, :, 0]


def check(weights: ExpertWeights, format: Format) -> None:
    """Raises:
    ValueError: the weights cannot be of that format, by their types and the shapes of their scales.
    """
    num_experts, _, hidden, intermediate = weights.gate_up.shape
    scale_shapes = {
        "gate_up": [
            (num_experts, 2, rows, intermediate) for rows in (format.num_blocks(hidden), format.scale_rows(hidden))
        ],
        "down": [(num_experts, format.num_blocks(intermediate), 1, hidden)],
    }
    for name, shapes in scale_shapes.items():
        values, scale = getattr(weights, name), getattr(weights, f"{name}_scale")
        if str(values.dtype) != format.weight:
            raise ValueError(f"{name} is {values.dtype}, but {format.name} stores {format.weight}")
        found, expected = None if scale is None else scale.shape, shapes if format.scaled else [None]
        if found not in expected:
            raise ValueError(f"{name}_scale has shape {found}, but {format.name} needs {expected[0]}")


def pad(weights: ExpertWeights, problem: Problem) -> ExpertWeights:
    """Weights as the kernel wants them: E to a multiple of the devices, H and I to multiples of 128, B1 as `Format.scale_rows` says.

    What is added is zero, and so are the biases there; scales there are 1, which every type of scale can hold. Arrays that need no
    padding are passed on, so a second call changes nothing.

    Raises:
      ValueError: weights that are larger than that, not of the problem's format, or without a bias that the problem has.
    """
    check(weights, problem.weights)
    for name in ("gate_up_bias", "down_bias"):
        if (getattr(weights, name) is not None) != getattr(problem, name):
            raise ValueError(f"{name} of the problem is {getattr(problem, name)}, the weights say otherwise")
    experts = problem.local_experts * problem.num_devices
    hidden, intermediate = problem.padded_hidden, problem.padded_intermediate
    shapes = {
        "gate_up": (experts, 2, hidden, intermediate),
        "down": (experts, intermediate, hidden),
        "gate_up_scale": (experts, 2, problem.weights.scale_rows(hidden), intermediate),
        "down_scale": (experts, problem.weights.num_blocks(intermediate), 1, hidden),
        "gate_up_bias": (experts, 2, 1, intermediate),
        "down_bias": (experts, 1, hidden),
    }
    return _expert_weights(**{name: _grown(getattr(weights, name), name, shape) for name, shape in shapes.items()})


def _grown(array: Any, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    if array is None:
        return None
    array = np.asarray(array)
    if array.shape == shape:
        return array
    if any(old > new for old, new in zip(array.shape, shape, strict=True)):
        raise ValueError(f"{name} {array.shape} does not fit into {shape}")
    grown = np.full(shape, 1 if name.endswith("_scale") else 0, array.dtype)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown


def _with_biases_of(
    weights: ExpertWeights, gate_up: Any, down: Any, gate_up_scale: Any, down_scale: Any
) -> ExpertWeights:
    """New matrices, with scales as stacks of matrices have them, and the old biases as float32."""
    biases = [
        None if bias is None else np.asarray(bias).astype(np.float32)
        for bias in (weights.gate_up_bias, weights.down_bias)
    ]
    down_scale = None if down_scale is None else down_scale[:, :, None]
    return _expert_weights(gate_up, down, gate_up_scale, down_scale, *biases)


def _expert_weights(*arrays: Any, **named: Any) -> ExpertWeights:
    """Of NumPy arrays, where the fields are declared as JAX's."""
    return ExpertWeights(*arrays, **named)
