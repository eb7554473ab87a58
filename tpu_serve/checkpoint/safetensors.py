"""Tensors of a folder of safetensors files, as views of the mapped files.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name to dtype, shape and the two ends of the data)
and the data. We read it ourselves because the safetensors package has no numpy types for the 8-bit floats.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, KeysView
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.json_file import read_json

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
"""The format's type names."""

INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: `start` counts from the beginning of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class SafetensorsFile:
    """One file. The header is read and checked at once, the data mapped when a tensor is first read."""

    def __init__(self, path: Path):
        self.path = path
        self.entries = dict(_parse(path))

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, entry.dtype)
        return np.frombuffer(self._map, entry.dtype, count, entry.start).reshape(entry.shape)

    def read_part(self, name: str, start: int, count: int) -> np.ndarray:
        entry = self.entries[name]
        buffer = np.empty(count * entry.dtype.itemsize, np.uint8)
        missing = buffer.data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start + start * entry.dtype.itemsize)
                while missing:
                    num_read = file.readinto(missing)
                    if not num_read:
                        raise ConfigError(f"{name} in {self.path} cannot be read: the file ends before it.")
                    missing = missing[num_read:]
        except OSError as error:
            raise ConfigError(f"{name} in {self.path} cannot be read: {error.strerror}.") from None
        return buffer.view(entry.dtype)


def _parse(path: Path) -> Iterator[tuple[str, _Entry]]:
    """(name, entry) of every tensor in a file, in the order of the data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            header_bytes = int.from_bytes(first, "little")
            _check_start(path, first, header_bytes, size)
            text = file.read(header_bytes)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not a safetensors file: its header is not JSON ({error}).") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is not a safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)

    tensors = sorted(
        (_check_entry(path, name, entry) for name, entry in header.items()), key=lambda tensor: tensor[1:3]
    )
    data, end = 8 + header_bytes, 0
    for name, tensor_start, tensor_end, dtype, shape in tensors:
        if tensor_start != end:
            fault = (
                "overlaps the tensor before it"
                if tensor_start < end
                else f"leaves a hole of {tensor_start - end} bytes"
            )
            raise ConfigError(f"{path} is broken: the data of {name} {fault}.")
        end = tensor_end
        yield name, _Entry(dtype, shape, data + tensor_start)
    _check_size(path, size, data + end)


def _check_start(path: Path, first: bytes, header_bytes: int, size: int) -> None:
    if first == b"version ":
        raise ConfigError(f"{path} is a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull`.")
    if len(first) < 8 or header_bytes > _MAX_HEADER_BYTES:
        raise ConfigError(f"{path} is not a safetensors file.")
    if size < 8 + header_bytes:
        _check_size(path, size, 8 + header_bytes)


def _check_size(path: Path, size: int, needed: int) -> None:
    if size < needed:
        raise ConfigError(
            f"{path} is truncated: it holds {size} bytes and needs at least {needed}, {needed - size} are missing. Download it again."
        )
    if size > needed:
        raise ConfigError(f"{path} is broken: {size - needed} bytes after the last tensor belong to nothing.")


def _check_entry(path: Path, name: str, entry: Any) -> tuple[str, int, int, np.dtype[Any], tuple[int, ...]]:
    """(name, start, end, dtype, shape) of a header entry; the ends count from the start of the data."""
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ConfigError(
            f"{path} is broken: the header's entry for {name} has no dtype, shape and data_offsets."
        ) from None
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ConfigError(f"{path} is broken: the shape or the offsets of {name} are not whole numbers.")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise ConfigError(f"{path}: {name} has type {kind!r}, which is not supported ({', '.join(DTYPES)} are).")
    needed = math.prod(shape) * dtype.itemsize
    if end - start != needed:
        raise ConfigError(f"{path} is broken: {name} {kind}{list(shape)} takes {needed} bytes, not {end - start}.")
    return name, start, end, dtype, shape


class SafetensorsFolder:
    """All tensors of a model folder, whatever files they are in.

    A folder holds `model.safetensors`, or shards named by an index, or several *.safetensors files without one.
    Arrays are read-only views of the mapped files: reading costs nothing until the values are touched, and a view keeps its file
    mapped.

    Raises:
      ConfigError: there is no such file, or one is missing, truncated or broken, or two of them hold one tensor.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._home: dict[str, SafetensorsFile] = {}
        paths, weight_map = _files(folder)
        for path in paths:
            file = SafetensorsFile(path)
            for name in file.entries:
                other = self._home.setdefault(name, file)
                if other is not file:
                    raise ConfigError(f"{folder} holds {name} twice: in {other.path.name} and in {path.name}.")
        for name, promised in weight_map.items():
            if name not in self._home or self._home[name].path.name != promised:
                raise ConfigError(f"{folder / INDEX} says that {name} is in {promised}, but it is not.")

    @property
    def names(self) -> KeysView[str]:
        """Every tensor's name."""
        return self._home.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def info(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """(dtype, shape) of a tensor, without touching its values."""
        entry = self._home[name].entries[name]
        return entry.dtype, entry.shape

    def num_bytes(self, name: str) -> int:
        dtype, shape = self.info(name)
        return math.prod(shape) * dtype.itemsize

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._home[name].path

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor's values, or some rows of its leading dimension: a read-only view of the file."""
        values = self._home[name].read(name)
        return values if rows is None else values[rows]

    def read_part(self, name: str, start: int, count: int) -> np.ndarray:
        """A copy of the flat tensor's elements from `start` on. A view kills the process where the disk fails or the file shrinks; this does not.

        Raises:
          ConfigError: the file cannot be read there.
        """
        return self._home[name].read_part(name, start, count)


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that hold the weights, and the index (tensor name to file name), empty where there is none."""
    single = folder / "model.safetensors"
    if single.exists():  # wins over an index, as in transformers
        return [single], {}
    if not (folder / INDEX).exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ConfigError(f"{folder} has no *.safetensors file. Other weight formats are not read.")
        return found, {}
    weight_map = _weight_map(folder)
    paths = sorted({folder / file for file in weight_map.values()})
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        names = ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")
        raise ConfigError(f"{folder} lacks {len(missing)} of the {len(paths)} files that {INDEX} names: {names}.")
    return paths, weight_map


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX} has no weight_map.")
    for file in weight_map.values():
        # A downloaded index must not name files outside its folder.
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{folder / INDEX} names {file!r}, which is not a file name.")
    return weight_map
