"""Quantised values as they lie in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import decode_matrix, filler, widen


@dataclass(frozen=True, slots=True)
class Stored:
    """Values and the scales that restore them, bit for bit what the checkpoint holds.

    Attributes:
      values: [..., O, N] of float8_e4m3fn, float8_e5m2, int8 or float4_e2m1fn, one value a byte. Inputs come last, whatever the orientation
        of the tensor that the values stand for.
      scale: f32[..., ceil(O / rows), ceil(N / columns)]: a value times the scale of its block is the weight.
      block: (rows, columns) that share a scale. The last block of a row or column may be cut off.
    """

    values: np.ndarray
    scale: np.ndarray
    block: tuple[int, int]

    def __post_init__(self) -> None:
        *leading, outputs, inputs = self.values.shape
        expected = (*leading, -(-outputs // self.block[0]), -(-inputs // self.block[1]))
        if self.scale.shape != expected or self.scale.dtype != np.float32:
            raise ValueError(
                f"values {self.values.shape} in blocks {self.block} have scales float32{expected}, "
                f"got {self.scale.dtype}{self.scale.shape}"
            )

    def dequantise(self) -> np.ndarray:
        """f32[..., O, N]. Products beyond float32 are infinite, and the NaNs among 8-bit values stay NaN."""
        restored = np.empty(self.values.shape, np.float32)
        for index in np.ndindex(*self.values.shape[:-2]):
            decode_matrix(filler(self.values[index], widen), restored[index], self.scale[index], self.block)
        return restored
