"""Writing safetensors files of limited size from tensors whose values come piece by piece."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tpu_serve.checkpoint.safetensors import DTYPES, INDEX

_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is to be written.

    Attributes:
      dtype: one of `DTYPES`.
      pieces: makes its values, in order: arrays of any shapes that together hold as many bytes as the tensor. Called once.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path,
    tensors: Sequence[NewTensor],
    max_shard_bytes: int,
    metadata: Mapping[str, str],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Writes tensors into `model.safetensors`, or into numbered shards and an index if one file would be too big.

    No more than one piece of a tensor is held in memory. The index is written last: without it, or with a file cut off, readers refuse the
    folder. When this returns, everything is on the disk.

    Args:
      folder: without weights so far.
      max_shard_bytes: of tensors in one file; a bigger tensor has a file to itself.
      metadata: goes into every file's header and into the index.
      progress: called with the bytes of each piece written.

    Returns:
      The files of tensors.

    Raises:
      OSError: they cannot be written.
    """
    shards = _deal(tensors, max_shard_bytes)
    if len(shards) == 1:
        paths = [folder / "model.safetensors"]
    else:
        paths = [folder / f"model-{place:05d}-of-{len(shards):05d}.safetensors" for place in range(1, len(shards) + 1)]
    for path, shard in zip(paths, shards, strict=True):
        _write_file(path, shard, metadata, progress)
    if len(shards) > 1:
        weight_map = {tensor.name: path.name for path, shard in zip(paths, shards, strict=True) for tensor in shard}
        total = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
        with (folder / INDEX).open("w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2) + "\n")
            _settle(file)
    return paths


def _deal(tensors: Sequence[NewTensor], max_shard_bytes: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def _write_file(
    path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], progress: Callable[[int], None]
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map tensors at their offsets, and some want those aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            num_bytes = 0
            for piece in tensor.pieces():
                # As bytes: the narrow floats have no buffer of their own, and no value may be touched.
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                num_bytes += piece.nbytes
                progress(piece.nbytes)
            if num_bytes != tensor.num_bytes:
                raise ValueError(f"{tensor.name} takes {tensor.num_bytes} bytes, but its pieces are {num_bytes}")
        _settle(file)


def _settle(file: Any) -> None:
    """Waits until a file is on the disk; a full one may say so only now."""
    file.flush()
    os.fsync(file.fileno())
