"""Integers of 4 or 8 bits that compressed-tensors packed into 32-bit words along the inputs.

`weight_packed` i32[O, ceil(N * bits / 32)] holds value + 2^(bits - 1), the lowest bits first; `weight_shape` i64[2] is [O, N]; `weight_scale`
[O, G], [O, 1] or one number; `weight_zero_point` is absent, or i32[ceil(O * bits / 32), G] packed in the same way along the outputs, or i8[O, G].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import Nibbles, decode_matrix, filler, unpack
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.grid import Grid, find_grid, grids
from tpu_serve.checkpoint.quantised.raw import INT8, INT32, INT64, SCALES, RawTensors
from tpu_serve.checkpoint.quantised.scheme import Scheme
from tpu_serve.config import ConfigError

BITS = (4, 8)

_NIBBLES = Nibbles(np.arange(16) - 8)


@dataclass(frozen=True, slots=True)
class Packed(Encoded):
    """A weight [O, N].

    Attributes:
      bits: of a value.
      grid: of scales and zero points.
      zero: the tensor of zero points, None where values are counted from zero.
    """

    bits: int
    grid: Grid
    zero: str | None

    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        num_columns = self.shape[1]
        codes = raw.read(self.parts[0])[start:stop].view(np.uint8)
        rows = slice(0, 1) if self.grid.shape[0] == 1 else slice(start, stop)
        scale = raw.scale(self.parts[1], self.grid.shape, rows)
        zero = None if self.zero is None else self._zeros(raw, self.zero)[rows]
        restored = np.empty((stop - start, num_columns), np.float32)

        def write(piece: np.ndarray, out: np.ndarray) -> None:
            if self.bits == 8:
                np.subtract(piece[:, :num_columns], np.float32(128), out=out)
            elif 2 * piece.shape[1] == num_columns:
                _NIBBLES(piece, out)
            else:  # the last word is not full
                whole = np.empty((len(piece), 2 * piece.shape[1]), np.float32)
                _NIBBLES(piece, whole)
                out[...] = whole[:, :num_columns]

        decode_matrix(filler(codes, write), restored, scale, self.grid.block, zero)
        return restored

    def _zeros(self, raw: RawTensors, name: str) -> np.ndarray:
        """Of all rows, f32 in the shape of the grid, counted as the values are: from -2^(bits - 1)."""
        stored = raw.read(name)
        if stored.dtype == INT8:
            return stored.reshape(self.grid.shape).astype(np.float32)
        codes = unpack(stored.T, self.bits)[:, : self.grid.shape[0]].T
        return codes.astype(np.float32) - np.float32(2 ** (self.bits - 1))


def find(raw: RawTensors, scheme: Scheme) -> Iterator[Encoded]:
    """The weights of this family in a folder.

    Raises:
      ConfigError: parts of a weight are missing or do not fit together, or its values are in an order of their own.
    """
    for module in raw.ending(".weight_packed"):
        if raw.dtype(f"{module}.weight_packed") == INT32:
            yield _packed(raw, scheme, f"{module}.weight")


def _packed(raw: RawTensors, scheme: Scheme, name: str) -> Packed:
    packed, order, zero = f"{name}_packed", f"{name}_g_idx", f"{name}_zero_point"
    if order in raw:
        raise ConfigError(
            f"{raw.place(order)} says that the inputs are grouped in an order of their own (actorder), which is not supported for "
            f"compressed-tensors. Quantise again with actorder null or static, or use a checkpoint of quant_method gptq."
        )
    scale, size = raw.need(f"{name}_scale", packed), raw.need(f"{name}_shape", packed)
    raw.check(size, (INT64, INT32), [(2,)], packed)
    outputs, inputs = (int(number) for number in raw.read(size))
    # A scheme may hold weights of both widths: the size tells.
    fitting = [bits for bits in BITS if raw.shape(packed) == (outputs, -(-inputs * bits // 32))]
    if not fitting or outputs < 1 or inputs < 1:
        forms = " or ".join(str([outputs, -(-inputs * bits // 32)]) for bits in BITS)
        raise raw.fault(packed, f"{size} says {[outputs, inputs]}: packed into 4 or 8 bits that is of shape {forms}")
    bits = scheme.bits if scheme.bits in fitting else fitting[0]
    shape = (outputs, inputs)
    raw.check(scale, SCALES, [form for form, _ in grids(shape, (), scheme.group_sizes)], packed)
    grid = find_grid(shape, raw.shape(scale), (), scheme.group_sizes)
    assert grid is not None  # its shape has been checked
    has_zero = zero in raw
    if has_zero:
        packed_shape = (-(-grid.shape[0] * bits // 32), grid.shape[1])
        shapes = {INT32: packed_shape, INT8: raw.shape(scale)}
        raw.check(zero, (INT32, INT8), [shapes.get(raw.dtype(zero), packed_shape)], packed)
    parts = (packed, scale, size, zero) if has_zero else (packed, scale, size)
    form = f"{bits}-bit integers, {grid.words}{' with zero points' if has_zero else ''}"
    return Packed(name, shape, parts, form, bits, grid, zero if has_zero else None)
