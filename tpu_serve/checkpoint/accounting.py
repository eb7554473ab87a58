"""Every tensor of a checkpoint and every weight of a model accounted for, from headers alone."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.device.params import ParamSpec, Source, iterate

MAX_NAMES = 10
"""Most tensors that an error lists."""

DERIVED = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")
"""Patterns of tensors that older checkpoints hold beside the weights: what config.json says already."""

OUTPUT_TABLE = "lm_head.weight"

ROWS_COMPARED = 4096
"""At a time."""

ANOTHER_MODEL = "config.json and the weights are not of one model."


class TensorFiles(Protocol):
    """Tensors by name: a folder of files, or a view of one that shows quantised tensors as float32."""

    @property
    def folder(self) -> Path: ...

    @property
    def names(self) -> Collection[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def info(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """(dtype, shape)."""

    def num_bytes(self, name: str) -> int:
        """Bytes to be read for it."""

    def path(self, name: str) -> Path:
        """The file that holds it."""

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Its values, or some rows of its leading dimension, not to be written to."""


def choose_sources(files: TensorFiles, specs: Any, ignore: Sequence[str]) -> dict[str, Source]:
    """Weight path to the source it is read from.

    Raises:
      ConfigError: a weight has no complete source, or a tensor is in none and not ignored.
    """
    chosen: dict[str, Source] = {}
    wanted: set[str] = set()
    gaps: list[str] = []
    siblings = Counter(map(_module, files.names))
    for path, spec in iterate(specs):
        complete = [source for source in spec.sources if all(key in files for key in source.keys)]
        if complete:
            # Two layouts may have names in common; where no shape fits, the first is the one to complain about.
            chosen[path] = next((source for source in complete if _fits(files, source)), complete[0])
            wanted.update(chosen[path].keys)
        else:
            # The layout that is nearly there is the one that was meant, or the one with the most siblings; the first is the most usual.
            nearest = min(
                spec.sources,
                key=lambda source: (
                    sum(key not in files for key in source.keys) / len(source.keys),
                    -siblings[_module(source.keys[0])],
                ),
            )
            gaps += [key for key in nearest.keys if key not in files]
            wanted.update(key for source in spec.sources for key in source.keys)
    patterns = (*ignore, *DERIVED)
    leftovers = [
        name
        for name in files.names
        if name not in wanted
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
        and not _changes_nothing(files, name)
    ]
    if gaps or leftovers:
        raise ConfigError(_account(files, list(dict.fromkeys(gaps)), sorted(leftovers)))
    return chosen


def _changes_nothing(files: TensorFiles, name: str) -> bool:
    """Whether a tensor is a bias of zeros: GPTQ's tools write one for every linear layer, whether it has a bias or not."""
    return name.endswith(".bias") and len(files.info(name)[1]) == 1 and not np.any(files.read(name))


def check_tied(files: TensorFiles, sources: Mapping[str, Source]) -> None:
    """Raises ConfigError where a model uses its embedding as the output table too, and the checkpoint has another output table."""
    if "lm_head" in sources or "embedding" not in sources:
        return
    embedding = sources["embedding"].keys[0]
    for name in (name for name in files.names if name.endswith(OUTPUT_TABLE)):
        if not _are_equal(files, name, embedding):
            raise ConfigError(
                f"{name} in {files.path(name)} is not the same as {embedding}, but config.json says that the model uses one for both. "
                "If it does not, say --hf-overrides '{\"tie_word_embeddings\": false}'."
            )


def _are_equal(files: TensorFiles, name: str, other: str) -> bool:
    shape = files.info(name)[1]
    if files.info(other)[1] != shape:
        return False
    parts = (slice(start, min(start + ROWS_COMPARED, shape[0])) for start in range(0, shape[0], ROWS_COMPARED))
    return all(np.array_equal(files.read(name, rows), files.read(other, rows)) for rows in parts)


def check_header(files: TensorFiles, path: str, spec: ParamSpec, source: Source) -> None:
    """Raises ConfigError where a tensor's shape or type cannot be that of its weight."""
    for key in source.keys:
        stored, shape = files.info(key)
        found = f"{stored}{list(shape)}"
        if source.shape is not None and shape != source.shape:
            raise ConfigError(
                f"{key} in {files.path(key)} is {found}, but the model expects the shape {list(source.shape)} for its weight {path}. "
                + ANOTHER_MODEL
            )
        if jnp.issubdtype(spec.dtype, jnp.floating) and not jnp.issubdtype(stored, jnp.floating):
            raise ConfigError(
                f"{key} in {files.path(key)} is {found}, but the weight {path} is {jnp.dtype(spec.dtype)}. Is it quantised?"
            )
    if is_cut(spec, source):
        _check_rows(files, path, spec, source)


def _check_rows(files: TensorFiles, path: str, spec: ParamSpec, source: Source) -> None:
    """Raises ConfigError where the rows of a tensor do not become those of its weight."""
    axis, expected = row_axis(spec, source), spec.given
    shapes = {files.info(key)[1] for key in source.keys}
    shape = next(iter(shapes))
    if source.keys_per_row:
        if len(source.keys) != expected[0] * source.keys_per_row:
            raise ValueError(f"{len(source.keys)} tensors for {expected[0]} rows of {path}")
        fits, dummy_shape = len(shapes) == 1, (source.keys_per_row, *shape)
    elif source.row_axis is None:  # as it is, or transposed: all of it at once
        fits, dummy_shape = True, shape
    else:
        fits = bool(shape) and math.prod(shape) % expected[axis] == 0
        dummy_shape = part_shape(shape, expected[axis]) if fits else shape
    found = "no rows of one shape"
    if fits:
        made = transformed(files, path, source, [np.broadcast_to(np.zeros((), np.bool_), dummy_shape)]).shape
        if source.keys_per_row or source.row_axis is not None:
            made = tuple(size * expected[axis] if at == axis else size for at, size in enumerate(made))
        if made == expected:
            return
        found = f"shape {list(made)}"
    raise ConfigError(
        f"{describe(files, source)} gives the weight {path} {found}, but the model expects {list(expected)}. {ANOTHER_MODEL}"
    )


def is_cut(spec: ParamSpec, source: Source) -> bool:
    """Whether the weight can be read row by row."""
    return source.cut_axis is not None and math.prod(spec.given) > 0 and bool(spec.given)


def row_axis(spec: ParamSpec, source: Source) -> int:
    """The dimension of a weight that is read row by row, the first where it is not."""
    return (source.cut_axis or 0) % len(spec.shape) if spec.shape else 0


def part_shape(shape: tuple[int, ...], num_rows: int, count: int = 1) -> tuple[int, ...]:
    """Shape in which `count` of a tensor's rows are handed to a transform."""
    return (count, *shape[1:]) if shape[0] == num_rows else (count, math.prod(shape) // num_rows)


def transformed(files: TensorFiles, path: str, source: Source, arrays: list[np.ndarray]) -> np.ndarray:
    """What a source's transform makes of arrays.

    Raises:
      ConfigError: it cannot take them.
    """
    try:
        return source.transform(arrays)
    except (ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"{describe(files, source)} cannot become the weight {path}: {error}.") from None


def describe(files: TensorFiles, source: Source) -> str:
    """The tensors of a source, with the file of the first, types and shapes."""
    names = source.keys[0] + (f" and {len(source.keys) - 1} more" if len(source.keys) > 1 else "")
    infos = [files.info(key) for key in source.keys]
    return f"{names} in {files.path(source.keys[0])} ({', '.join(sorted({f'{dtype}{list(shape)}' for dtype, shape in infos}))})"


def _module(name: str) -> str:
    """Of `a.b.k_proj.weight`: `a.b`, where its siblings are too."""
    return ".".join(name.split(".")[:-2])


def _fits(files: TensorFiles, source: Source) -> bool:
    return source.shape is None or all(files.info(key)[1] == source.shape for key in source.keys)


def _account(files: TensorFiles, gaps: list[str], leftovers: list[str]) -> str:
    """The error about tensors that are missing or that nobody wants."""
    parts = []
    if gaps:
        candidates = leftovers or sorted(files.names)
        parts.append(
            f"{files.folder} lacks weights that the model needs ({len(gaps)}):"
            + _listed(f"{name}{_nearest(name, candidates)}" for name in gaps[:MAX_NAMES])
            + _more(gaps)
        )
    if leftovers:
        parts.append(
            f"{files.folder} holds tensors that the model does not know ({len(leftovers)}):"
            + _listed(leftovers[:MAX_NAMES])
            + _more(leftovers)
        )
    return "\n".join(parts)


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def _more(names: Sequence[str]) -> str:
    return f"\n  … and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""


def _nearest(name: str, candidates: Sequence[str]) -> str:
    # A big model has tens of thousands of names; those that end alike are the likely ones.
    end = name.rsplit(".", 2)[-2:]
    alike = [candidate for candidate in candidates if candidate.rsplit(".", 2)[-2:] == end] or candidates
    near = difflib.get_close_matches(name, alike[:1000], n=1)
    return f" (there is {near[0]})" if near else ""
