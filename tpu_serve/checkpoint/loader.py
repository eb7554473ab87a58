"""From a checkpoint folder to a tree of device arrays, with every tensor on both sides accounted for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import AxisRules, named_sharding
from tpu_serve.device.params import ParamSpec, Source, iterate, map_specs

MAX_NAMES = 10
"""Most tensors that an error lists."""


def load_params(
    specs: Any,
    folder: Path,
    mesh: Mesh,
    rules: AxisRules,
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The tree of `specs` as device arrays read from `folder`.

    Each weight comes from the first of its sources whose tensors all exist and have the shape that it names. Everything that can be
    known from the files' headers is checked before any value is read. On the host there is never more than one weight at a time.

    Args:
      specs: nested dicts and lists of ParamSpec.
      ignore: patterns (`model.visual.*`) of tensors that the model knows and does not want.
      progress: called with (bytes read, bytes in all) of the checkpoint, at the start and after each weight.

    Raises:
      ConfigError: weights without tensors, tensors that nobody wants, a shape or type that does not fit, a broken file, or a
        mesh that cannot split a weight.
    """
    files = SafetensorsFolder(folder)
    sources = _choose_sources(files, specs, ignore)
    for path, spec in iterate(specs):
        _check_header(files, path, spec, sources[path])
    shardings = {path: _sharding(path, spec, mesh, rules) for path, spec in iterate(specs)}
    sizes = {path: sum(map(files.num_bytes, source.keys)) for path, source in sources.items()}
    done, total = 0, sum(sizes.values())

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    def load(path: str, spec: ParamSpec) -> jax.Array:
        placed = jax.device_put(_host_array(files, path, spec, sources[path]), shardings[path])
        placed.block_until_ready()  # the host copy lives until the transfer ends
        report(sizes[path])
        return placed

    report(0)
    return map_specs(load, specs)


def _choose_sources(files: SafetensorsFolder, specs: Any, ignore: Sequence[str]) -> dict[str, Source]:
    """Weight path to the source it is read from.

    Raises:
      ConfigError: a weight has no complete source, or a tensor is in none and not ignored.
    """
    chosen: dict[str, Source] = {}
    wanted: set[str] = set()
    gaps: list[str] = []
    for path, spec in iterate(specs):
        complete = [source for source in spec.sources if all(key in files for key in source.keys)]
        if complete:
            # Two layouts may have names in common; where no shape fits, the first is the one to complain about.
            chosen[path] = next((source for source in complete if _fits(files, source)), complete[0])
            wanted.update(chosen[path].keys)
        else:
            # The layout that is nearly there is the one that was meant; the first is the most usual.
            nearest = min(
                spec.sources, key=lambda source: sum(key not in files for key in source.keys) / len(source.keys)
            )
            gaps += [key for key in nearest.keys if key not in files]
            wanted.update(key for source in spec.sources for key in source.keys)
    leftovers = [
        name for name in files.names if name not in wanted and not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if gaps or leftovers:
        raise ConfigError(_account(files, list(dict.fromkeys(gaps)), sorted(leftovers)))
    return chosen


def _fits(files: SafetensorsFolder, source: Source) -> bool:
    return source.shape is None or all(files.info(key)[1] == source.shape for key in source.keys)


def _account(files: SafetensorsFolder, gaps: list[str], leftovers: list[str]) -> str:
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


def _sharding(path: str, spec: ParamSpec, mesh: Mesh, rules: AxisRules) -> NamedSharding:
    try:
        return named_sharding(mesh, rules, spec.axes, spec.shape)
    except ValueError as error:
        raise ConfigError(f"The weight {path} cannot be placed: {error}.") from None


def _check_header(files: SafetensorsFolder, path: str, spec: ParamSpec, source: Source) -> None:
    """Raises ConfigError where a tensor's shape or type cannot be that of its weight."""
    for key in source.keys:
        stored, shape = files.info(key)
        found = f"{stored}{list(shape)}"
        if source.shape is not None and shape != source.shape:
            raise ConfigError(
                f"{key} in {files.folder} is {found}, but the model expects the shape {list(source.shape)} for its weight {path}. "
                f"config.json and the weights are not of one model."
            )
        if jnp.issubdtype(spec.dtype, jnp.floating) and not jnp.issubdtype(stored, jnp.floating):
            raise ConfigError(
                f"{key} in {files.folder} is {found}, but the weight {path} is {jnp.dtype(spec.dtype)}. Is it quantised?"
            )


def _host_array(files: SafetensorsFolder, path: str, spec: ParamSpec, source: Source) -> np.ndarray:
    """One weight with the spec's shape and type, in memory of its own."""
    names = source.keys[0] + (f" and {len(source.keys) - 1} more" if len(source.keys) > 1 else "")
    stored = [files.read(key) for key in source.keys]
    found = ", ".join(sorted({f"{array.dtype}{list(array.shape)}" for array in stored}))
    try:
        array = source.transform(stored)
    except (ValueError, IndexError, TypeError) as error:
        raise ConfigError(f"{names} in {files.folder} ({found}) cannot become the weight {path}: {error}.") from None
    if array.shape != spec.shape:
        raise ConfigError(
            f"{names} in {files.folder} ({found}) gives the weight {path} shape {list(array.shape)}, but the model expects "
            f"{list(spec.shape)}. config.json and the weights are not of one model."
        )
    array = array.astype(jnp.dtype(spec.dtype), order="C", copy=False)
    # On CPU the device array may be this very memory: it must not be the file's, which someone may overwrite.
    return array if array.flags.writeable else array.copy()
