"""Matrices in a narrow number format: what is stored, what its scales look like, and how they get there.

Letters: K contraction rows and N columns of a matrix, B blocks of rows that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tpu_serve.device.batch import pytree

Matrix = np.ndarray[Any, np.dtype[Any]]


@pytree
@dataclass(frozen=True, slots=True)
class QuantisedArray:
    """Device arrays of a quantised weight.

    Attributes:
      values: [..., K, N] in the format's type.
      scale: f32, with the shape that `MatrixFormat.scale_shape` says; restores a value by multiplication.
    """

    values: jax.Array
    scale: jax.Array


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """How the matrices of a weight [..., K, N] are stored.

    Attributes:
      name: for messages.
      weight: type of the values, as NumPy (ml_dtypes) knows it.
      block: rows that share a scale; None for one scale per column.
      scale_rows: K to the rows of the stored scales, at least B; what is beyond B is 1.
      blocks_apart: the scales of a matrix are [rows, 1, N] rather than [rows, N].
      quantise: [K, N] to values [K, N] and scale f32[B, N]. Raises ValueError for a value that is not finite.
      dequantise: values and scale to f32[K, N].
    """

    name: str
    weight: str
    block: int | None
    scale_rows: Callable[[int], int] = field(repr=False)
    blocks_apart: bool
    quantise: Callable[[Matrix], tuple[Matrix, Matrix]] = field(repr=False)
    dequantise: Callable[[Matrix, Matrix], Matrix] = field(repr=False)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return np.dtype(self.weight)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a weight of this shape."""
        *leading, num_rows, num_columns = shape
        apart = (1,) if self.blocks_apart else ()
        return (*leading, self.scale_rows(num_rows), *apart, num_columns)

    def scale_axes(self, axes: Sequence[str | None]) -> tuple[str | None, ...]:
        """Logical axes of the scales; the dimension of blocks is never split."""
        *leading, _, columns = axes
        return (*leading, None, *((None,) if self.blocks_apart else ()), columns)


def num_bits(dtype: Any) -> int:
    """Of one value on the device: types of less than 8 bits are packed there, though each takes a byte in NumPy."""
    dtype = np.dtype(dtype)
    try:
        return int(ml_dtypes.finfo(dtype).bits)
    except ValueError:
        return (
            int(ml_dtypes.iinfo(dtype).bits) if dtype.name in ("int2", "uint2", "int4", "uint4") else 8 * dtype.itemsize
        )


def quantise_array(array: np.ndarray, shape: Sequence[int], format: MatrixFormat) -> QuantisedArray:
    """A weight [..., K, N] in its format, filled up at the ends to `shape`: with values of 0 and scales of 1. On the host.

    Raises:
      ValueError: a value is not finite.
    """
    values = np.zeros(shape, format.dtype)
    scale = ones_for_scales(shape, format)
    for index in np.ndindex(*array.shape[:-2]):
        put_matrix(values[index], scale[index], *format.quantise(array[index]))
    return host_arrays(values, scale, format)


def ones_for_scales(shape: Sequence[int], format: MatrixFormat) -> np.ndarray:
    """f32[..., rows, N] for `put_matrix`."""
    *leading, num_rows, num_columns = shape
    return np.ones((*leading, format.scale_rows(num_rows), num_columns), np.float32)


def put_matrix(values: np.ndarray, scale: np.ndarray, new_values: np.ndarray, new_scale: np.ndarray) -> None:
    """Writes a matrix and its scales f32[B, N] into the upper left corners of larger ones."""
    num_rows, num_columns = new_values.shape
    # As bytes where it is one: NumPy copies the narrow types value by value.
    target = values[:num_rows, :num_columns]
    if values.dtype.itemsize == 1:
        target, new_values = target.view(np.uint8), new_values.view(np.uint8)
    target[...] = new_values
    scale[: len(new_scale), :num_columns] = new_scale


def host_arrays(values: np.ndarray, scale: np.ndarray, format: MatrixFormat) -> QuantisedArray:
    """Values [..., K, N] and scales [..., rows, N] with the scales in the shape that is stored."""
    return QuantisedArray(*_pair(values, scale.reshape(format.scale_shape(values.shape))))


def _pair(*arrays: Any) -> Any:
    """NumPy arrays where the fields are declared as JAX's."""
    return arrays


def num_array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Bytes of an array on the device."""
    return -(-math.prod(shape) * num_bits(dtype) // 8)
