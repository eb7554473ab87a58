"""The tensors of a quantised checkpoint as they lie in its files, with errors that name file, tensor and what was expected."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError

FLOAT8 = tuple(np.dtype(kind) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
EXPONENT = np.dtype(ml_dtypes.float8_e8m0fnu)
UINT8, INT8, INT32, INT64 = (np.dtype(kind) for kind in (np.uint8, np.int8, np.int32, np.int64))
SCALES = (*(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16)), EXPONENT, UINT8)
"""Types of scales; bytes are exponents."""

Part = slice | tuple[slice, ...]


class RawTensors:
    """Headers and values.

    Attributes:
      files: the folder.
    """

    def __init__(self, files: SafetensorsFolder):
        self.files = files

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.info(name)[1]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self.files.info(name)[0]

    def ending(self, suffix: str) -> list[str]:
        """The names that end so, without the ending."""
        return [name.removesuffix(suffix) for name in self.files.names if name.endswith(suffix)]

    def place(self, name: str) -> str:
        """The tensor and its file, in words."""
        return f"{name} in {self.files.path(name)}"

    def fault(self, name: str, expectation: str) -> ConfigError:
        """The error about a tensor's type or shape."""
        dtype, shape = self.files.info(name)
        return ConfigError(f"{self.place(name)} is {dtype}{list(shape)}, but {expectation}.")

    def need(self, name: str, owner: str) -> str:
        """The name of a tensor that must be there because `owner` is.

        Raises:
          ConfigError: it is not.
        """
        if name not in self.files:
            raise ConfigError(f"{self.place(owner)} is quantised, but {name}, which it is restored with, is missing.")
        return name

    def check(self, name: str, dtypes: tuple[np.dtype[Any], ...], shapes: list[tuple[int, ...]], owner: str) -> None:
        """Raises:
        ConfigError: a tensor has none of these types or none of these shapes, as `owner` needs it.
        """
        dtype, shape = self.files.info(name)
        if dtype not in dtypes or shape not in shapes:
            types, forms = " or ".join(map(str, dtypes)), " or ".join(str(list(one)) for one in dict.fromkeys(shapes))
            owner_dtype, owner_shape = self.files.info(owner)
            raise self.fault(name, f"{owner} {owner_dtype}{list(owner_shape)} needs it to be {types} of shape {forms}")

    def read(self, name: str) -> np.ndarray:
        return self.files.read(name)

    def scale(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> np.ndarray:
        """A tensor of scales looked at in another shape, or a part of it, as float32. Bytes are exponents, 2^(byte - 127).

        Raises:
          ConfigError: one that was asked for is NaN or infinite.
        """
        stored = self.files.read(name).reshape(shape)
        if part is not None:
            stored = stored[part]
        scale = (stored.view(EXPONENT) if stored.dtype == UINT8 else stored).astype(np.float32)
        if not np.isfinite(scale).all():
            raise ConfigError(f"{self.place(name)} holds scales that are not finite, so what they scale is lost.")
        return scale
