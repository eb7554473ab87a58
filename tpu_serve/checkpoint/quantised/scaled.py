"""FP8 and int8: a byte per value, and a scale per tensor, output channel, group or block.

`weight` [O, N] and `weight_scale_inv` or `weight_scale`; the scale multiplies under either name. Tensors that hold all experts, such as
`gate_up_proj` [E, O, N], have `gate_up_proj_scale_inv` or `gate_up_proj_scale`. Integers may be counted from a `weight_zero_point`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import decode_matrix, filler, widen
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.grid import Grid, find_grid, grids
from tpu_serve.checkpoint.quantised.raw import FLOAT8, INT8, SCALES, RawTensors
from tpu_serve.checkpoint.quantised.scheme import Scheme
from tpu_serve.checkpoint.quantised.stored import Stored

SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True)
class Scaled(Encoded):
    """A weight [O, N], or [E, O, N] with scales for each expert.

    Attributes:
      grid: of the scales.
      has_zero: whether the last of `parts` is what integers are counted from.
    """

    grid: Grid
    has_zero: bool

    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        if self.has_zero:
            return self._read_with_zero(raw, start, stop)
        # Scales of cut-off blocks belong to the whole block: rows before `start` come along.
        first = start - start % self._row_unit()
        return self._stored(raw, first, stop).dequantise()[start - first :]

    def stored(self, raw: RawTensors, start: int, stop: int) -> Stored | None:
        return None if self.has_zero else self._stored(raw, start, stop)

    def _stored(self, raw: RawTensors, start: int, stop: int) -> Stored:
        if start % self._row_unit():
            raise ValueError(f"row {start} of {self.name} is not the first of a block of {self._row_unit()}")
        values = raw.read(self.parts[0])[start:stop]
        return Stored(values, raw.scale(self.parts[1], self.grid.shape, self._scale_rows(start, stop)), self.grid.block)

    def _read_with_zero(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        values, rows = raw.read(self.parts[0])[start:stop], self._scale_rows(start, stop)
        scale = raw.scale(self.parts[1], self.grid.shape, rows)
        zero = raw.read(self.parts[2]).reshape(self.grid.shape)[rows].astype(np.float32)
        restored = np.empty(values.shape, np.float32)
        decode_matrix(filler(values, widen), restored, scale, self.grid.block, zero)
        return restored

    def _row_unit(self) -> int:
        """Rows of the leading dimension that share a row of scales; 1 where all of them do."""
        return 1 if len(self.shape) == 3 or self.grid.shape[0] == 1 else self.grid.block[0]

    def _scale_rows(self, start: int, stop: int) -> slice:
        if self.grid.shape[0] == 1:
            return slice(0, min(1, stop - start))
        unit = self._row_unit()
        return slice(start // unit, -(-stop // unit))


def find(raw: RawTensors, scheme: Scheme) -> Iterator[Encoded]:
    """The weights of this family in a folder.

    Raises:
      ConfigError: a scale or zero point has a type or shape that its values cannot have.
    """
    for suffix in SUFFIXES:
        for name in raw.ending(suffix):
            if name in raw and raw.dtype(name) in (*FLOAT8, INT8):
                yield _scaled(raw, scheme, name, name + suffix)


def _scaled(raw: RawTensors, scheme: Scheme, name: str, scale: str) -> Scaled:
    shape = raw.shape(name)
    if len(shape) not in (2, 3):
        raise raw.fault(name, "quantised weights have 2 dimensions, or 3 where they are those of all experts")
    known = grids(shape, scheme.blocks, scheme.group_sizes)
    raw.check(scale, SCALES, [form for form, _ in known], name)
    grid = find_grid(shape, raw.shape(scale), scheme.blocks, scheme.group_sizes)
    assert grid is not None  # its shape has been checked
    zero = name + "_zero_point"
    if has_zero := zero in raw and raw.dtype(name) == INT8 and len(shape) == 2:
        raw.check(zero, (INT8,), [raw.shape(scale)], name)
    kind = "int8" if raw.dtype(name) == INT8 else "FP8"
    parts = (name, scale, zero) if has_zero else (name, scale)
    return Scaled(name, shape, parts, f"{kind}, {grid.words}", grid, has_zero)
