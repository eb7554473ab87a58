"""Experts in a narrow format, made on the way from the files to the devices, one row of the weight at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tpu_serve.checkpoint.accounting import TensorFiles, transformed
from tpu_serve.checkpoint.reading import WeightReader, empty_like_rows
from tpu_serve.config import ConfigError
from tpu_serve.device.params import ParamSpec, map_specs
from tpu_serve.device.quantised import MatrixFormat, ones_for_scales, put_matrix
from tpu_serve.kernels.fused_moe_v2.formats import Format
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise_matrix, quantise_matrix

_SCRATCH_BYTES = 256 * 2**20
"""Rows are quantised side by side only while their float32 values stay below this."""


def quantised(specs: Any, format: Format) -> Any:
    """The same tree with the experts' matrices in a format of the kernel; one without scales is only another type.

    Those are the leaves `experts.gate_up` and `experts.down`, whose scales get the shapes that `ExpertWeights` documents.
    """

    def change(path: str, spec: ParamSpec) -> ParamSpec:
        if not f".{path}".endswith((".experts.gate_up", ".experts.down")):
            return spec
        if not format.scaled:
            return dataclasses.replace(spec, dtype=np.dtype(format.weight))
        return dataclasses.replace(spec, format=matrix_format(format, is_down=path.endswith(".down")))

    return map_specs(change, specs)


def matrix_format(format: Format, *, is_down: bool) -> MatrixFormat:
    """A scaled format of the kernel for the second or the first projections, whose scales lie differently."""

    def quantise(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, scale = quantise_matrix(matrix, format)
        assert scale is not None
        return values, scale

    return MatrixFormat(
        name=format.name,
        weight=format.weight,
        block=format.block,
        scale_rows=format.num_blocks if is_down else format.scale_rows,
        blocks_apart=is_down,
        quantise=quantise,
        dequantise=lambda values, scale: dequantise_matrix(values, scale, format),
    )


class _Row(NamedTuple):
    """Matrices of one row, in the order of np.ndindex, and the sums of squares that the error is made of."""

    matrices: list[tuple[np.ndarray, np.ndarray]]
    square: float
    difference: float


class RowQuantiser:
    """Quantises one weight row by row.

    Attributes:
      error: |restored - given| / |given| of the rows so far, in the Frobenius norm; 0 for values that the checkpoint holds in the format.
    """

    def __init__(self, reader: WeightReader, format: MatrixFormat):
        self._reader, self._format = reader, format
        self._square = self._difference = 0.0
        self._swaps: bool | None = None

    @property
    def error(self) -> float:
        return math.sqrt(self._difference / self._square) if self._square else 0.0

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Values and scales of rows with their padding, which may be all there is of them.

        Raises:
          ConfigError: the tensors cannot be read, or hold a value that is not finite.
        """
        spec, format = self._reader.spec, self._format
        shape = (stop - start, *spec.shape[1:])
        values, scale = None, ones_for_scales(shape, format)
        given = range(start, min(stop, spec.given[0]))
        row_bytes = 4 * math.prod(spec.given[1:])
        self._reader.prepare_rows()
        is_parallel = row_bytes * self._reader.num_threads <= _SCRATCH_BYTES
        made = self._reader.pool.map(self._row, given) if is_parallel else map(self._row, given)
        for row, (matrices, square, difference) in zip(given, made, strict=True):
            if values is None:
                values = empty_like_rows(matrices[0][0], shape, format.dtype)
                values[...] = 0
            for index, matrix in zip(np.ndindex(*shape[1:-2]), matrices, strict=True):
                put_matrix(values[row - start][index], scale[row - start][index], *matrix)
            self._square += square
            self._difference += difference
        if values is None:
            values = np.zeros(shape, format.dtype)
        return values, scale.reshape(format.scale_shape(shape))

    def _row(self, row: int) -> _Row:
        kept = self._stored(row)
        if kept is not None:
            return kept
        array = self._reader.rows(row, row + 1, np.dtype(np.float32), in_parallel=False)[0]
        matrices, square, difference = [], 0.0, 0.0
        for index in np.ndindex(*array.shape[:-2]):
            matrix = array[index]
            if self._format.block is not None:
                matrix = np.ascontiguousarray(matrix)  # scales are, and NumPy is slow where orders differ
            try:
                values, scale = self._format.quantise(matrix)
            except ValueError:
                raise self._not_finite(row) from None
            matrices.append((values, scale))
            square += _square(matrix)
            restored = self._format.dequantise(values, scale)
            restored -= matrix
            difference += _square(restored)
        return _Row(matrices, square, difference)

    def _stored(self, row: int) -> _Row | None:
        """A row as the checkpoint has it, where it is quantised there already and the format can hold it bit for bit."""
        reader, stored = self._reader, getattr(self._reader.files, "stored", None)
        if stored is None or not reader.has_rows:
            return None
        if reader.source.keys_per_row:
            parts = [stored(key) for key in reader.keys_of_row(row)]
        elif reader.rows_are_leading:
            parts = [stored(reader.source.keys[0], slice(row, row + 1))]
        else:
            return None
        if any(part is None or part.values.dtype != self._format.dtype for part in parts):
            return None
        if not all(np.isfinite(part.values).all() for part in parts):
            raise self._not_finite(row)
        arrays = [np.concatenate([_stacked(part.values) for part in parts])]
        arrays.append(np.concatenate([_stacked(_by_value(part)) for part in parts]))
        if self._swaps is None:
            self._swaps = self._has_outputs_last()
        if self._swaps:
            arrays = [array.swapaxes(-1, -2) for array in arrays]
        values, by_value = (
            transformed(reader.files, reader.path, reader.source, [np.ascontiguousarray(array)])[0] for array in arrays
        )
        block, num_rows = self._format.block or values.shape[-2], values.shape[-2]
        scale = by_value[..., ::block, :]
        if not np.array_equal(np.repeat(scale, block, axis=-2)[..., :num_rows, :], by_value):
            return None  # its blocks are others
        return _Row([(values[index], scale[index]) for index in np.ndindex(*values.shape[:-2])], 0.0, 0.0)

    def _has_outputs_last(self) -> bool:
        """Whether the checkpoint's tensors have their inputs, the weight's contraction rows, before their outputs."""
        reader = self._reader
        shape = reader.files.info(reader.source.keys[0])[1]
        count = (reader.source.keys_per_row,) if reader.source.keys_per_row else (1,)
        shape = (*count, *shape[-2:])
        columns = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
        made = transformed(reader.files, reader.path, reader.source, [columns])
        return bool((made[..., :1, :] == made).all())

    def _not_finite(self, row: int) -> ConfigError:
        reader = self._reader
        names = [key for key in reader.keys_of_row(row) if not _is_finite(reader.files, key, row, reader)]
        where = "" if reader.source.keys_per_row else f" (row {row})"
        name = (names or reader.keys_of_row(row))[0]
        return ConfigError(
            f"{name}{where} in {reader.files.path(name)} holds values that are not finite, but the "
            f"weight {reader.path} is quantised to {self._format.name}, which needs every value to be a finite number."
        )


def _is_finite(files: TensorFiles, key: str, row: int, reader: WeightReader) -> bool:
    return not reader.source.keys_per_row or bool(np.isfinite(files.read(key)).all())


def _stacked(array: np.ndarray) -> np.ndarray:
    """[1, ...] of a matrix, or what is a stack already."""
    return array if array.ndim == 3 else array[None]


def _by_value(stored: Any) -> np.ndarray:
    """The scale of each value."""
    scale = stored.scale
    for axis, (size, num) in enumerate(zip(stored.values.shape[-2:], stored.block, strict=True), start=-2):
        scale = np.repeat(scale, num, axis=axis).take(range(size), axis=axis) if num > 1 else scale
    return scale


def _square(array: np.ndarray) -> float:
    return float(np.linalg.norm(array)) ** 2


OnQuantised = Callable[[str, float], None]
"""Told a weight's path and the relative error that quantising it made, see `RowQuantiser`."""
