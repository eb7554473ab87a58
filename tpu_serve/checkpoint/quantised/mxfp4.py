"""MXFP4 as GPT-OSS has it: 4-bit floats (e2m1), and for every 32 inputs a power of two as a byte, 2^(byte - 127).

`gate_up_proj_blocks` u8[E, O, N / 32, 16] holds two values a byte, the first in the low nibble, and `gate_up_proj_scales` u8[E, O, N / 32];
`down_proj` is the same. The weights that they stand for are those of the unquantised checkpoints, [E, N, O]: `gate_up_proj` [E, H, 2I], still with
gate and up by turns, and `down_proj` [E, I, H].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import E2M1, Nibbles, decode_matrix, filler, unpack
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.raw import EXPONENT, UINT8, RawTensors
from tpu_serve.checkpoint.quantised.scheme import Scheme
from tpu_serve.checkpoint.quantised.stored import Stored

GROUP_SIZE = 32
_NIBBLES = Nibbles(E2M1)


@dataclass(frozen=True, slots=True)
class Mxfp4(Encoded):
    """A weight [E, N, O]. What `read` returns is its transpose in memory."""

    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        codes, scale = self._parts(raw, start, stop)
        num_experts, outputs, num_bytes = codes.shape
        restored = np.empty((num_experts, outputs, 2 * num_bytes), np.float32)
        for expert in range(num_experts):
            decode_matrix(
                filler(codes[expert], _NIBBLES),
                restored[expert],
                scale[expert],
                (1, GROUP_SIZE),
            )
        return restored.swapaxes(1, 2)

    def stored(self, raw: RawTensors, start: int, stop: int) -> Stored | None:
        """Values [E, O, N]: inputs last, as in the file."""
        codes, scale = self._parts(raw, start, stop)
        return Stored(unpack(codes, 4).view(E2M1.dtype), scale, (1, GROUP_SIZE))

    def _parts(self, raw: RawTensors, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of two values [E, O, N / 2] and scales f32[E, O, N / 32]."""
        blocks, scales = self.parts
        codes = raw.read(blocks)[start:stop]
        return codes.reshape(*codes.shape[:2], -1), raw.scale(scales, raw.shape(scales), slice(start, stop))


def find(raw: RawTensors, scheme: Scheme) -> Iterator[Encoded]:
    """The weights of this family in a folder.

    Raises:
      ConfigError: parts of a weight are missing or do not fit together.
    """
    for name in raw.ending("_blocks"):
        blocks = f"{name}_blocks"
        scales = raw.need(f"{name}_scales", blocks)
        shape = raw.shape(blocks)
        if raw.dtype(blocks) != UINT8 or len(shape) != 4 or shape[3] != GROUP_SIZE // 2:
            raise raw.fault(blocks, "MXFP4 packs experts into uint8 of shape [experts, outputs, inputs / 32, 16]")
        raw.check(scales, (UINT8, EXPONENT), [shape[:3]], blocks)
        yield Mxfp4(name, (shape[0], shape[2] * GROUP_SIZE, shape[1]), (blocks, scales), "MXFP4")
