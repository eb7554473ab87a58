"""The arithmetic that the formats share: narrow values to float32, piece by piece so that a piece is scaled while it is in the cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Fill = Callable[[int, int, np.ndarray], None]
"""(start, stop, out): writes the unscaled values of rows start to stop into `out` f32[stop - start, N]."""

_PIECE_VALUES = 1 << 16

E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
"""The 4-bit float of every code."""


def decode_matrix(
    fill: Fill,
    out: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int],
    zero: np.ndarray | None = None,
    row_multiple: int = 1,
) -> None:
    """Writes (value - zero) * scale of every value into `out`.

    Args:
      out: f32[O, N].
      scale: f32[ceil(O / rows), ceil(N / columns)] of blocks (rows, columns).
      zero: what values are counted from, of the same shape.
      row_multiple: `fill` is asked for rows that start at a multiple of this.
    """
    num_rows, num_columns = out.shape
    # One row of scales is that of all rows, wherever a piece ends.
    height = 1 if len(scale) == 1 else block[0]
    unit = math.lcm(height, row_multiple)
    step = max(1, _PIECE_VALUES // (max(1, num_columns) * unit)) * unit
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            piece = out[start:stop]
            fill(start, stop, piece)
            blocks = slice(0, 1) if len(scale) == 1 else slice(start // height, -(-stop // height))
            if zero is not None:
                _apply(np.subtract, piece, zero[blocks], height, block[1])
            _apply(np.multiply, piece, scale[blocks], height, block[1])


def _apply(operation: np.ufunc, piece: np.ndarray, grid: np.ndarray, height: int, width: int) -> None:
    """`piece` [R, N] becomes `operation` of itself and the grid [B, C], each entry of which stands for `height` rows and `width` columns.

    A grid with one row stands for all of them.
    """
    num_rows, num_columns = piece.shape
    if grid.shape[1] > 1:
        grid = np.repeat(grid, width, axis=1)[:, :num_columns]
    if height == 1 or len(grid) == 1:
        operation(piece, grid, out=piece)
        return
    whole = num_rows // height
    blocks = piece[: whole * height].reshape(whole, height, num_columns)
    operation(blocks, grid[:whole, None], out=blocks)
    if whole * height < num_rows:
        rest = piece[whole * height :]
        operation(rest, grid[whole:], out=rest)


def filler(values: np.ndarray, write: Callable[[np.ndarray, np.ndarray], None]) -> Fill:
    """Fills from rows of `values` by `write(rows, out)`."""

    def fill(start: int, stop: int, out: np.ndarray) -> None:
        write(values[start:stop], out)

    return fill


def widen(values: np.ndarray, out: np.ndarray) -> None:
    """Writes 8-bit integers or floats, or 4-bit floats that take a byte each, as float32. Both arrays are contiguous."""
    if values.dtype.kind in "iu":
        out[...] = values
        return
    codes = values.view(np.uint8).reshape(-1)
    if codes.size % 2:
        np.take(_single_table(values.dtype), codes, out=out.reshape(-1), mode="clip")
    else:
        # Two values at a time: NumPy turns every index into 8 bytes first, which takes longer than the rest.
        np.take(_byte_pair_table(values.dtype), codes.view(np.uint16), out=_pairs(out), mode="clip")


class Nibbles:
    """Writes two float32 for every byte, from the `values` of the 16 codes. The low nibble comes first. Both arrays are contiguous."""

    def __init__(self, values: np.ndarray):
        values = values.astype(np.float32)
        codes = np.arange(256)
        # Side by side in a complex64, so that both are copied at once.
        self._table = np.stack([values[codes & 15], values[codes >> 4]], axis=1).view(np.complex64)[:, 0]

    def __call__(self, codes: np.ndarray, out: np.ndarray) -> None:
        np.take(self._table, codes.reshape(-1), out=_pairs(out), mode="clip")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """u8[..., W * 32 / bits] from 32-bit words [..., W] of unsigned integers of 4 or 8 bits, the lowest bits first."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return codes
    pairs = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _pairs(out: np.ndarray) -> np.ndarray:
    return out.reshape(-1).view(np.complex64)


@functools.cache
def _single_table(dtype: np.dtype[Any]) -> np.ndarray:
    codes = np.arange(256, dtype=np.uint8)
    # The narrower types use the low bits of their byte.
    return (codes & np.uint8(15) if dtype == E2M1.dtype else codes).view(dtype).astype(np.float32)


@functools.cache
def _byte_pair_table(dtype: np.dtype[Any]) -> np.ndarray:
    single = _single_table(dtype)
    codes = np.arange(1 << 16)
    return np.stack([single[codes & 255], single[codes >> 8]], axis=1).view(np.complex64)[:, 0]
