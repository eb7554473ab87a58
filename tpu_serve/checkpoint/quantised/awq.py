"""4-bit integers packed by AWQ along the outputs, in the order of its `gemm` kernels.

`qweight` i32[N, O / 8], `qzeros` i32[G, O / 8], `scales` [G, O]. Of the eight outputs of a word, the nibbles from the lowest up hold
0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.decode import decode_matrix, unpack
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.raw import INT32, SCALES, RawTensors
from tpu_serve.checkpoint.quantised.scheme import Scheme

BITS = 4
_PER_WORD = 32 // BITS
_NIBBLE_OF_OUTPUT = np.argsort((0, 2, 4, 6, 1, 3, 5, 7))


@dataclass(frozen=True, slots=True)
class Awq(Encoded):
    """A weight [O, N].

    Attributes:
      group_size: inputs that share a scale.
    """

    group_size: int

    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        begin = start - start % _PER_WORD  # words are whole
        words, scale_name = raw.read(self.parts[0]), self.parts[2]
        zeros = _outputs(raw.read(self.parts[1])[:, begin // _PER_WORD : -(-stop // _PER_WORD)])
        scale = raw.scale(scale_name, raw.shape(scale_name), (slice(None), slice(begin, stop)))
        restored = np.empty((stop - begin, self.shape[1]), np.float32)

        def fill(first: int, last: int, out: np.ndarray) -> None:
            some = words[:, (begin + first) // _PER_WORD : -(-(begin + last) // _PER_WORD)]
            out[...] = _outputs(some)[: last - first]

        zero = zeros[: stop - begin].astype(np.float32)
        scale = np.ascontiguousarray(scale.T)
        decode_matrix(fill, restored, scale, (1, self.group_size), zero, row_multiple=_PER_WORD)
        return restored[start - begin :]


def _outputs(words: np.ndarray) -> np.ndarray:
    """u8[8 * W, N] from words [N, W]."""
    nibbles = unpack(words.T, BITS).reshape(words.shape[1], words.shape[0], _PER_WORD)
    return nibbles[:, :, _NIBBLE_OF_OUTPUT].swapaxes(1, 2).reshape(-1, words.shape[0])


def find(raw: RawTensors, scheme: Scheme) -> Iterator[Encoded]:
    """The weights of this family in a folder.

    Raises:
      ConfigError: parts of a weight are missing or do not fit together.
    """
    for module in raw.ending(".qweight"):
        yield _awq(raw, scheme, module)


def _awq(raw: RawTensors, scheme: Scheme, module: str) -> Awq:
    values = f"{module}.qweight"
    zeros, scale = raw.need(f"{module}.qzeros", values), raw.need(f"{module}.scales", values)
    if raw.dtype(values) != INT32 or len(raw.shape(values)) != 2:
        raise raw.fault(values, f"AWQ packs 4-bit values into int32 of shape [inputs, outputs / {_PER_WORD}]")
    inputs, num_words = raw.shape(values)
    (size,) = scheme.group_sizes
    size = inputs if size == -1 else size
    num_groups = -(-inputs // size)
    raw.check(scale, SCALES, [(num_groups, num_words * _PER_WORD)], values)
    raw.check(zeros, (INT32,), [(num_groups, num_words)], values)
    words = f"groups of {size}" if scheme.group_sizes != (-1,) else "a scale per output channel"
    shape = (num_words * _PER_WORD, inputs)
    return Awq(f"{module}.weight", shape, (values, zeros, scale), f"4-bit integers, {words} (AWQ)", size)
