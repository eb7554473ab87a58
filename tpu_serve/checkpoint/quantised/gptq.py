"""Integers packed by GPTQ along the inputs.

`qweight` i32[N * bits / 32, O], `qzeros` i32[G, O * bits / 32], `scales` [G, O], and `g_idx` i32[N], the group of every input: absent or counting
up where inputs are not reordered. The lowest bits come first. Version 1 of the format stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import Nibbles, decode_matrix, filler, unpack
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.raw import INT32, INT64, SCALES, RawTensors
from tpu_serve.checkpoint.quantised.scheme import Scheme
from tpu_serve.config import ConfigError

_NIBBLES = Nibbles(np.arange(16))
_REORDERED_ROWS = 256
"""Outputs restored at a time where every input has a scale of its own."""


@dataclass(frozen=True, slots=True)
class Gptq(Encoded):
    """A weight [O, N].

    Attributes:
      bits: of a value.
      group_size: inputs that share a scale, where they are not reordered.
      zero_offset: what is added to stored zero points.
      groups: the tensor `g_idx`, if there is one.
    """

    bits: int
    group_size: int
    zero_offset: int
    groups: str | None

    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        columns = slice(None), slice(start, stop)
        words = raw.read(self.parts[0])
        zeros, scale_name = raw.read(self.parts[1]), self.parts[2]
        scale = np.ascontiguousarray(raw.scale(scale_name, raw.shape(scale_name), columns).T)
        zero = np.ascontiguousarray(unpack(zeros, self.bits)[columns].T).astype(np.float32)
        zero += np.float32(self.zero_offset)
        restored = np.empty((stop - start, self.shape[1]), np.float32)

        def write(rows: np.ndarray, out: np.ndarray) -> None:
            codes = np.ascontiguousarray(rows).view(np.uint8)
            if self.bits == 8:
                out[...] = codes
            else:
                _NIBBLES(codes, out)

        words, order = words[columns].T, self._order(raw)
        if order is None:
            decode_matrix(filler(words, write), restored, scale, (1, self.group_size), zero)
            return restored
        for first in range(0, len(restored), _REORDERED_ROWS):
            some = slice(first, first + _REORDERED_ROWS)
            decode_matrix(
                filler(words[some], write),
                restored[some],
                scale[some].take(order, axis=1),
                (1, 1),
                zero[some].take(order, axis=1),
            )
        return restored

    def _order(self, raw: RawTensors) -> np.ndarray | None:
        """The group of every input, None where they count up.

        Raises:
          ConfigError: there is no such group.
        """
        if self.groups is None:
            return None
        order, num_groups = raw.read(self.groups), raw.shape(self.parts[2])[0]
        if np.array_equal(order, np.arange(len(order)) // self.group_size):
            return None
        if order.min() < 0 or order.max() >= num_groups:
            raise ConfigError(
                f"{raw.place(self.groups)} names groups from {order.min()} to {order.max()}, but there are {num_groups} of them."
            )
        return order


def find(raw: RawTensors, scheme: Scheme) -> Iterator[Encoded]:
    """The weights of this family in a folder.

    Raises:
      ConfigError: parts of a weight are missing or do not fit together.
    """
    for module in raw.ending(".qweight"):
        yield _gptq(raw, scheme, module)


def _gptq(raw: RawTensors, scheme: Scheme, module: str) -> Gptq:
    values, per_word = f"{module}.qweight", 32 // scheme.bits
    zeros, scale = raw.need(f"{module}.qzeros", values), raw.need(f"{module}.scales", values)
    if raw.dtype(values) != INT32 or len(raw.shape(values)) != 2 or raw.shape(values)[1] % per_word:
        raise raw.fault(
            values, f"GPTQ packs {scheme.bits}-bit values into int32 of shape [inputs / {per_word}, outputs]"
        )
    num_words, outputs = raw.shape(values)
    inputs = num_words * per_word
    (size,) = scheme.group_sizes
    size = inputs if size == -1 else size
    num_groups = -(-inputs // size)
    raw.check(scale, SCALES, [(num_groups, outputs)], values)
    raw.check(zeros, (INT32,), [(num_groups, outputs // per_word)], values)
    groups = f"{module}.g_idx"
    has_groups = groups in raw
    if has_groups:
        raw.check(groups, (INT32, INT64), [(inputs,)], values)
    parts = (values, zeros, scale, groups) if has_groups else (values, zeros, scale)
    words = f"groups of {size}" if scheme.group_sizes != (-1,) else "a scale per output channel"
    form = f"{scheme.bits}-bit integers, {words} (GPTQ)"
    shape = (outputs, inputs)
    return Gptq(
        f"{module}.weight", shape, parts, form, scheme.bits, size, scheme.zero_offset, groups if has_groups else None
    )
