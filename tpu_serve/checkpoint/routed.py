"""The routed experts of a checkpoint, found by the names and shapes of tensors and read one expert at a time, whatever their layout."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpu_serve.checkpoint.layouts import (
    FUSED,
    PER_EXPERT,
    Sizes,
    find_layout,
    fuse,
    is_routed,
    places,
    read_sizes,
    split_path,
)
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError

PUBLISHED = "published"
"""Hugging Face's fused tensors: read, but never written."""

_NAMES = ("gate_proj", "up_proj", "down_proj")
_BLOCK_SPARSE_NAMES = ("w1", "w3", "w2")
_BLOCK_SPARSE = "block_sparse_moe"

_ONE = re.compile(r"(?P<prefix>.*\bexperts)\.(?P<expert>0|[1-9]\d*)\.(?P<name>\w+)\.weight", re.ASCII)
_ALL = re.compile(r"(?P<prefix>.+)\.(?P<name>wi|gate_up_proj)", re.ASCII)

ReadPart = Callable[[str, int, int], np.ndarray]
"""`SafetensorsFolder.read_part`."""
ReadMatrix = Callable[[int, int], np.ndarray]
"""(layer, expert) -> the expert's matrix."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed experts of one layer, or of all layers where those are stacked.

    Attributes:
      prefix: of their names.
      layout: one of `LAYOUTS`, or PUBLISHED.
      names: the tensors that hold them.
      wi_dtype, wo_dtype: of gate and up, and of down.
      wi: reads `[H, 2I]`.
      wo: reads `[I, H]`.
    """

    prefix: str
    layout: str
    names: tuple[str, ...]
    sizes: Sizes
    wi_dtype: np.dtype[Any]
    wo_dtype: np.dtype[Any]
    wi: ReadMatrix = field(repr=False)
    wo: ReadMatrix = field(repr=False)


def expert_names(prefix: str) -> tuple[str, str, str]:
    """What gate, up and down of one expert are called under a prefix. Mixtral and its relations have names of their own."""
    return _BLOCK_SPARSE_NAMES if _BLOCK_SPARSE in split_path(prefix) else _NAMES


def published_name(name: str, model_type: object) -> str:
    """The name that a tensor has in the checkpoints that are published of a family."""
    # transformers 5 keeps Mixtral's blocks in memory under another name, which re-saved checkpoints may have.
    return name.replace(".mlp.", f".{_BLOCK_SPARSE}.") if model_type == "mixtral" else name


def find_routed(files: SafetensorsFolder) -> list[RoutedExperts]:
    """All routed experts of a folder, in the order of their first tensors.

    Raises:
      ConfigError: some are incomplete, of different types or shapes, or of shapes that no layout has.
    """
    # Gate and up are written one after the other: the last matrix is kept for both, one for all groups.
    read = functools.lru_cache(maxsize=1)(files.read_part)
    singles: dict[str, dict[int, set[str]]] = {}
    found: dict[str, RoutedExperts | None] = {}
    for name in files.names:
        if not is_routed(split_path(name)):
            continue
        if (one := _ONE.fullmatch(name)) and one["name"] in expert_names(one["prefix"]):
            singles.setdefault(one["prefix"], {}).setdefault(int(one["expert"]), set()).add(one["name"])
            found.setdefault(one["prefix"], None)
        elif every := _ALL.fullmatch(name):
            prefix = every["prefix"]
            if found.get(prefix):
                raise ConfigError(f"{files.folder} holds the experts of {prefix} in two layouts.")
            found[prefix] = (_stacked if every["name"] == "wi" else _published)(files, read, prefix)
    for prefix, parts in singles.items():
        if found[prefix]:
            raise ConfigError(f"{files.folder} holds the experts of {prefix} in two layouts.")
        found[prefix] = _single(files, prefix, parts)
    return [experts for experts in found.values() if experts]


def _single(files: SafetensorsFolder, prefix: str, parts: dict[int, set[str]]) -> RoutedExperts:
    """From three tensors for each expert."""
    num_experts, roles = max(parts) + 1, expert_names(prefix)
    for expert in range(num_experts):
        for role in roles:
            if role not in parts.get(expert, ()):
                raise ConfigError(
                    f"{files.folder} has no {prefix}.{expert}.{role}.weight, but has others of its layer."
                )

    def names(*some: str) -> list[str]:
        return [f"{prefix}.{expert}.{role}.weight" for expert in range(num_experts) for role in some]

    gate, up, down = roles
    wi_dtype, wi_shape = _common(files, names(gate, up))
    wo_dtype, wo_shape = _common(files, names(down))
    if len(wi_shape) != 2 or wo_shape != wi_shape[::-1]:
        raise ConfigError(
            f"{prefix}.0.{gate}.weight {list(wi_shape)} and {prefix}.0.{down}.weight {list(wo_shape)} are not [I, H] and [H, I]."
        )
    inner, hidden = wi_shape

    def matrix(expert: int, role: str, shape: tuple[int, ...]) -> np.ndarray:
        return files.read_part(f"{prefix}.{expert}.{role}.weight", 0, inner * hidden).reshape(shape)

    return RoutedExperts(
        prefix, PER_EXPERT, tuple(names(*roles)), Sizes((), num_experts, hidden, inner), wi_dtype, wo_dtype,
        lambda _, expert: fuse(matrix(expert, gate, wi_shape), matrix(expert, up, wi_shape)),
        lambda _, expert: matrix(expert, down, wo_shape).T,
    )  # fmt: skip


def _common(files: SafetensorsFolder, names: Iterable[str]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape that all of these tensors have."""
    first, *others = names
    expected = files.info(first)
    for name in others:
        if files.info(name) != expected:
            (dtype, shape), (other_dtype, other_shape) = expected, files.info(name)
            raise ConfigError(
                f"{name} in {files.folder} is {other_dtype}{list(other_shape)}, but {first} is {dtype}{list(shape)}."
            )
    return expected


def _stacked(files: SafetensorsFolder, read: ReadPart, prefix: str) -> RoutedExperts:
    """From `wi` and `wo`."""
    wi, wo = f"{prefix}.wi", f"{prefix}.wo"
    wi_dtype, wi_shape, wo_dtype, wo_shape = _pair(files, wi, wo)
    try:
        layout = find_layout(wi_shape, wo_shape)
    except ConfigError as error:
        raise ConfigError(f"{prefix} in {files.folder}: {error}") from None
    sizes = read_sizes(layout, wi_shape)
    place = {one: places(one, sizes.num_layers, sizes.num_experts) for one in (layout, FUSED)}

    def read_wi(layer: int, expert: int) -> np.ndarray:
        return _block(read, wi, int(place[layout][layer, expert]), (sizes.hidden, 2 * sizes.inner))

    def read_wo(layer: int, expert: int) -> np.ndarray:
        return _block(read, wo, int(place[FUSED][layer, expert]), (sizes.inner, sizes.hidden))

    return RoutedExperts(prefix, layout, (wi, wo), sizes, wi_dtype, wo_dtype, read_wi, read_wo)


def _published(files: SafetensorsFolder, read: ReadPart, prefix: str) -> RoutedExperts:
    """From `gate_up_proj` and `down_proj`."""
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    wi_dtype, wi_shape, wo_dtype, wo_shape = _pair(files, gate_up, down)
    # Some families interleave gate and up and store them [E, H, 2I]; their down_proj [E, I, H] tells.
    if len(wi_shape) != 3 or wo_shape != (wi_shape[0], wi_shape[2], wi_shape[1] // 2) or wi_shape[1] % 2:
        raise ConfigError(
            f"{gate_up} {list(wi_shape)} and {down} {list(wo_shape)} are not [E, 2I, H] and [E, H, I]: this form is not known."
        )
    num_experts, hidden, inner = wo_shape

    def read_wi(_: int, expert: int) -> np.ndarray:
        return _block(read, gate_up, expert, (2 * inner, hidden)).T

    def read_wo(_: int, expert: int) -> np.ndarray:
        return _block(read, down, expert, (hidden, inner)).T

    sizes = Sizes((), num_experts, hidden, inner)
    return RoutedExperts(prefix, PUBLISHED, (gate_up, down), sizes, wi_dtype, wo_dtype, read_wi, read_wo)


def _pair(
    files: SafetensorsFolder, wi: str, wo: str
) -> tuple[np.dtype[Any], tuple[int, ...], np.dtype[Any], tuple[int, ...]]:
    if wo not in files:
        raise ConfigError(f"{files.folder} has {wi}, but no {wo}.")
    return (*files.info(wi), *files.info(wo))


def _block(read: ReadPart, name: str, place: int, shape: tuple[int, int]) -> np.ndarray:
    """A matrix out of a tensor of such matrices."""
    rows, columns = shape
    return read(name, place * rows * columns, rows * columns).reshape(shape)
