"""NVFP4: 4-bit floats (e2m1), an 8-bit float for every 16 inputs and one float32 for all of them.

compressed-tensors: `weight_packed` u8[O, N / 2], `weight_scale` f8[O, N / 16], `weight_global_scale` f32[1], which divides.
ModelOpt: `weight`, `weight_scale` and `weight_scale_2` f32[], which multiplies. The first of two values is in the low nibble.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import E2M1, Nibbles, decode_matrix, filler, unpack
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.raw import FLOAT8, UINT8, RawTensors
from tpu_serve.checkpoint.quantised.scheme import Scheme
from tpu_serve.checkpoint.quantised.stored import Stored
from tpu_serve.config import ConfigError

GROUP_SIZE = 16
_NIBBLES = Nibbles(E2M1)
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Nvfp4(Encoded):
    """A weight [O, N].

    Attributes:
      divides: whether the scale of the tensor divides.
    """

    divides: bool

    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        codes, scale = raw.read(self.parts[0])[start:stop], self._scale(raw, start, stop)
        restored = np.empty((stop - start, self.shape[1]), np.float32)
        decode_matrix(filler(codes, _NIBBLES), restored, scale, (1, GROUP_SIZE))
        return restored

    def stored(self, raw: RawTensors, start: int, stop: int) -> Stored | None:
        """With one float32 scale for every 16 inputs, the product of the two that the file holds."""
        values = unpack(raw.read(self.parts[0])[start:stop], 4).view(E2M1.dtype)
        return Stored(values, self._scale(raw, start, stop), (1, GROUP_SIZE))

    def _scale(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        _, local, whole = self.parts
        scale = raw.scale(local, raw.shape(local), slice(start, stop))
        factor = raw.scale(whole, ())
        if not self.divides:
            return scale * factor
        if factor == 0:
            raise ConfigError(f"{raw.place(whole)} is 0, but what it scales is divided by it.")
        return scale / factor


def find(raw: RawTensors, scheme: Scheme) -> Iterator[Encoded]:
    """The weights of this family in a folder.

    Raises:
      ConfigError: parts of a weight are missing or do not fit together.
    """
    for module in raw.ending(".weight_packed"):
        name = f"{module}.weight"
        if raw.dtype(f"{name}_packed") == UINT8:
            yield _nvfp4(raw, name, f"{name}_packed", f"{name}_global_scale", "NVFP4 (compressed-tensors)", True)
    for module in raw.ending(".weight"):
        name = f"{module}.weight"
        if raw.dtype(name) == UINT8:
            yield _nvfp4(raw, name, name, f"{name}_scale_2", "NVFP4 (ModelOpt)", False)


def _nvfp4(raw: RawTensors, name: str, values: str, whole: str, form: str, divides: bool) -> Nvfp4:
    local = raw.need(f"{name}_scale", values)
    raw.need(whole, values)
    if len(raw.shape(values)) != 2:
        raise raw.fault(values, "NVFP4 packs values into uint8 of shape [outputs, inputs / 2]")
    outputs, num_bytes = raw.shape(values)
    inputs = 2 * num_bytes
    raw.check(local, FLOAT8[:1], [(outputs, -(-inputs // GROUP_SIZE))], values)
    raw.check(whole, (_FLOAT32,), [(), (1,)], values)
    return Nvfp4(name, (outputs, inputs), (values, local, whole), form, divides)
