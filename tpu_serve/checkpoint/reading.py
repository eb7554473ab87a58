"""Weights in parts: from the tensors of a checkpoint to host arrays that hold no more than was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_serve.checkpoint.accounting import (
    ANOTHER_MODEL,
    TensorFiles,
    describe,
    is_cut,
    part_shape,
    row_axis,
    transformed,
)
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.params import ParamSpec, Source

Box = tuple[slice, ...]
"""A range of every dimension, with both ends."""

_CHUNK_BYTES = 8 * 2**20
"""One thread reads so much of a tensor at a time."""


@dataclass
class WeightReader:
    """Reads one weight, without its padding.

    Attributes:
      files: where it lies.
      path, spec, source: the weight; `check_header` has seen them.
      pool: threads that read, `num_threads` of them.
    """

    files: TensorFiles
    path: str
    spec: ParamSpec
    source: Source
    pool: Executor
    num_threads: int

    def __post_init__(self) -> None:
        self.is_cut = is_cut(self.spec, self.source)
        self.axis = row_axis(self.spec, self.source)
        self.num_bytes = sum(map(self.files.num_bytes, self.source.keys))
        self._whole: np.ndarray | None = None

    def read(self, box: Box) -> np.ndarray:
        """A part of the weight in the spec's type, in memory of its own, in whatever order of the dimensions was quickest.

        Raises:
          ConfigError: the tensors cannot be read or do not become the weight.
        """
        if not self.is_cut or not self._is_rows(box):
            return np.array(self.whole()[box], jnp.dtype(self.spec.dtype), order="K")
        return self._rows(box[self.axis].start, box[self.axis].stop, jnp.dtype(self.spec.dtype), True)

    @property
    def has_rows(self) -> bool:
        """Whether rows of the leading dimension can be read alone."""
        return self.is_cut and self.axis == 0

    @property
    def rows_are_leading(self) -> bool:
        """Whether the leading dimension of the only tensor is that of the rows."""
        return self.files.info(self.source.keys[0])[1][:1] == self.spec.given[self.axis : self.axis + 1]

    def prepare_rows(self) -> None:
        """To be called before threads call `rows`."""
        if not self.has_rows:
            self.whole()

    def rows(self, start: int, stop: int, dtype: Any, *, in_parallel: bool) -> np.ndarray:
        """Some rows of the leading dimension, and all of the others, in a type.

        Args:
          in_parallel: read by the threads of the pool, which must not be asked by one of them.

        Raises:
          ConfigError: as `read`.
        """
        if not self.has_rows:
            return np.array(self.whole()[start:stop], dtype, order="K")
        return self._rows(start, stop, dtype, in_parallel)

    def _rows(self, start: int, stop: int, dtype: Any, in_parallel: bool) -> np.ndarray:
        stored = self._stored_rows(start, stop, dtype, in_parallel)
        array = transformed(self.files, self.path, self.source, [stored])
        expected = tuple(stop - start if at == self.axis else size for at, size in enumerate(self.spec.given))
        self._check_shape(array, expected)
        return array

    def whole(self) -> np.ndarray:
        """All of the weight in the checkpoint's type, a view of the files where that is possible. It is kept.

        Raises:
          ConfigError: as `read`.
        """
        if self._whole is None:
            with reading(self.files, self.source.keys):
                stored = [self.files.read(key) for key in self.source.keys]
            array = transformed(self.files, self.path, self.source, stored)
            self._check_shape(array, self.spec.given)
            self._whole = array
        return self._whole

    def keys_of_row(self, row: int) -> tuple[str, ...]:
        """The tensors that hold a row."""
        count = self.source.keys_per_row
        return self.source.keys[row * count : (row + 1) * count] if count else self.source.keys

    def _stored_rows(self, start: int, stop: int, dtype: Any, in_parallel: bool) -> np.ndarray:
        """What the transform takes for these rows: one array, all of it of one type."""
        files, count = self.files, self.source.keys_per_row
        _, shape = files.info(self.source.keys[0])
        if count:
            keys = self.source.keys[start * count : stop * count]
            stored = np.empty((len(keys), *shape), dtype)
            jobs = [_job(files, key, stored[place], 0, math.prod(shape)) for place, key in enumerate(keys)]
        else:
            (key,), num_rows = self.source.keys, self.spec.given[self.axis]
            stored = np.empty(part_shape(shape, num_rows, stop - start), dtype)
            size = math.prod(shape) // num_rows
            step = max(1, _CHUNK_BYTES // max(1, size * stored.itemsize))
            jobs = [
                _job(
                    files, key, stored[at - start : min(at + step, stop) - start], at * size, size, shape[0] == num_rows
                )
                for at in range(start, stop, step)
            ]
        run = self.pool.map if in_parallel and len(jobs) > 1 else map
        for _ in run(lambda job: job(), jobs):
            pass
        return stored

    def _is_rows(self, box: Box) -> bool:
        """Whether a part has all of every dimension but that of the rows."""
        return all(
            at == self.axis or (one.start, one.stop) == (0, size)
            for at, (one, size) in enumerate(zip(box, self.spec.given, strict=True))
        )

    def _check_shape(self, array: np.ndarray, expected: tuple[int, ...]) -> None:
        if array.shape != expected:
            raise ConfigError(
                f"{describe(self.files, self.source)} gives the weight {self.path} shape {list(array.shape)}, but the model "
                f"expects {list(expected)}. {ANOTHER_MODEL}"
            )


def empty_like_rows(row: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose last dimensions lie in memory in the order of those of `row`, and any others before them."""
    order = [at - row.ndim for at in np.argsort([-stride for stride in row.strides], kind="stable")]
    order = [*range(-len(shape), -row.ndim), *order]
    return np.empty([shape[at] for at in order], dtype).transpose(np.argsort([at + len(shape) for at in order]))


def grown(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array with zeros at the ends of its dimensions, in the order that they have in memory."""
    if array.shape == shape:
        return array
    larger = empty_like_rows(array, shape, array.dtype)
    kind = f"u{array.itemsize}"  # NumPy copies the narrow floats value by value
    larger.view(kind)[...] = 0
    larger.view(kind)[tuple(map(slice, array.shape))] = array.view(kind)
    return larger


class reading:  # noqa: N801  used like a function
    """While tensors are read: a failure of the disk becomes an error that names them."""

    def __init__(self, files: TensorFiles, keys: Sequence[str]):
        self._names = keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
        self._path = files.path(keys[0])

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError):
            raise ConfigError(f"{self._names} in {self._path} cannot be read: {error.strerror or error}.") from None


def _job(
    files: TensorFiles, key: str, target: np.ndarray, start: int, size: int, is_leading: bool = False
) -> Callable[[], None]:
    """Reads values of a tensor into `target`.

    Args:
      start: the first of them in the flat tensor.
      size: of a row; all there is where `target` is the whole tensor.
      is_leading: the rows are the tensor's leading dimension.
    """

    def read() -> None:
        with reading(files, [key]):
            if isinstance(files, SafetensorsFolder):
                # A copy, not a view: a disk that fails is an error then, and large reads beat page faults.
                values = files.read_part(key, start, target.size)
            elif is_leading:
                first = start // size
                values = files.read(key, slice(first, first + len(target)))
            else:
                values = files.read(key).reshape(-1)[start : start + target.size]
        _copy(values.reshape(target.shape), target)

    return read


def _copy(values: np.ndarray, target: np.ndarray) -> None:
    if values.dtype == target.dtype and values.flags.c_contiguous:
        # As bytes: NumPy copies the narrow floats value by value, and lets no other thread run.
        values, target = values.reshape(-1).view(np.uint8), target.reshape(-1).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):  # what a narrower type cannot hold becomes infinite
        target[...] = values
