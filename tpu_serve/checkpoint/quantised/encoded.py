"""One weight of a quantised checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tpu_serve.checkpoint.quantised.raw import RawTensors
from tpu_serve.checkpoint.quantised.stored import Stored


@dataclass(frozen=True, slots=True)
class Encoded(ABC):
    """A weight that several tensors stand for.

    Attributes:
      name, shape: of the weight; its type is float32.
      parts: the tensors that it is restored from, the one with the values first.
      form: how it is stored, in words.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    form: str

    @abstractmethod
    def read(self, raw: RawTensors, start: int, stop: int) -> np.ndarray:
        """Rows start to stop of the leading dimension, float32, in memory of their own.

        Raises:
          ConfigError: a scale is not finite, or an index is out of range.
        """

    def stored(self, raw: RawTensors, start: int, stop: int) -> Stored | None:
        """The same rows before they are restored; None where the format has more than values and one scale for each.

        Raises:
          ConfigError: a scale is not finite.
          ValueError: the rows do not start with a block.
        """
        return None
