"""A copy of a checkpoint folder with its routed experts in another layout, complete or not there at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from tpu_serve.checkpoint.folder import SMALL_FILES
from tpu_serve.checkpoint.layouts import PER_EXPERT, places, split_path, unfuse
from tpu_serve.checkpoint.quantised.scheme import read_scheme
from tpu_serve.checkpoint.routed import RoutedExperts, expert_names, find_routed, published_name
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.checkpoint.shards import NewTensor, write_shards
from tpu_serve.config import ConfigError
from tpu_serve.hf_config import read_config

COPIED_FILES = (*SMALL_FILES, "*.md", "*.txt", "LICENSE*", "NOTICE*")
LAYOUT_KEY = "moe_layout"
"""Says the layout, in the metadata of the files and of the index. For people: readers go by names and shapes."""

_PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written.

    Attributes:
      num_groups: tensors' prefixes that hold routed experts: layers, where none are stacked.
      num_files, num_bytes: of weights.
      kept: tensors of experts that are no projection (scales, biases) and were copied as they are.
    """

    num_groups: int
    num_files: int
    num_bytes: int
    kept: tuple[str, ...]


def convert_folder(
    source: Path,
    target: Path,
    layout: str,
    *,
    max_shard_bytes: int,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Writes `target`: the weights of `source` with the routed experts in `layout`, and copies of its configuration and tokenizer.

    No value changes. Everything is written into a folder beside the target, which takes the target's name when it is complete; a folder that
    is there already is replaced then and not before. In memory there are never more than a few matrices of experts, or pieces of 16 MiB.

    Args:
      layout: one of `LAYOUTS`.
      overwrite: whether `target` may be a model folder already.
      progress: called with (bytes written, bytes in all) of the weights.

    Raises:
      ConfigError: what was asked for makes no sense, the source is broken or has no routed experts, or the target cannot be written.
        Nothing has changed then.
    """
    target = _check_target(source, target, overwrite)
    config = read_config(source)
    if (scheme := read_scheme(config)) is not None:
        raise ConfigError(
            f"{source} is quantised ({scheme.label}). Only unquantised experts are converted: scales would no longer fit their weights."
        )
    model_type = config.get("model_type", None)
    files = SafetensorsFolder(source)
    groups = find_routed(files)
    if not groups:
        raise ConfigError(f"{source} has no routed experts that are known, so there is nothing to convert.")
    tensors = _plan(files, groups, layout, model_type)
    total = sum(tensor.num_bytes for tensor in tensors)
    free = shutil.disk_usage(target.parent).free
    if free < total:
        raise ConfigError(f"{target} needs {total:,} bytes, but only {free:,} are free in {target.parent}.")
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
        # "pt": some readers ask which framework the tensors are laid out for.
        paths = write_shards(partial, tensors, max_shard_bytes, {"format": "pt", LAYOUT_KEY: layout}, report)
        _copy_small_files(source, partial)
        _put(partial, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    taken = {name for group in groups for name in group.names}
    kept = tuple(name for name in files.names if name not in taken and "experts" in split_path(name))
    return Converted(len(groups), len(paths), total, kept)


def _check_target(source: Path, target: Path, overwrite: bool) -> Path:
    """The target without symbolic links, once it is known to be one."""
    origin, target = source.resolve(), target.resolve()
    if target == origin:
        raise ConfigError(f"{source} is both the source and the target; a checkpoint is not converted in place.")
    if target in origin.parents:
        raise ConfigError(f"{target} holds the source, so it cannot be the target.")
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be written: there is no folder {target.parent}.")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; the target is a folder.")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise ConfigError(f"{target} is not empty; --overwrite replaces it.")
        if not (target / "config.json").is_file():
            raise ConfigError(f"{target} is no model folder (it has no config.json), so it is not replaced.")
    return target


def _plan(files: SafetensorsFolder, groups: list[RoutedExperts], layout: str, model_type: object) -> list[NewTensor]:
    """What is written, in the order of the source; experts where the first tensor of their group is."""
    group_of = {
        name: group
        for group in groups
        if group.layout != layout or published_name(group.prefix, model_type) != group.prefix
        for name in group.names
    }
    planned: dict[str, NewTensor] = {}
    seen: set[str] = set()
    for name in files.names:
        group = group_of.get(name)
        if group is None:
            made = [_same(files, name, published_name(name, model_type))]
        elif group.prefix in seen:
            continue
        else:
            seen.add(group.prefix)
            prefix = published_name(group.prefix, model_type)
            made = _one_by_one(group, prefix) if layout == PER_EXPERT else _stacked(group, prefix, layout)
        for tensor in made:
            if tensor.name in planned:
                raise ConfigError(f"Two tensors of {files.folder} would become {tensor.name}.")
            planned[tensor.name] = tensor
    return list(planned.values())


def _same(files: SafetensorsFolder, name: str, new_name: str) -> NewTensor:
    dtype, shape = files.info(name)
    count, step = files.num_bytes(name) // dtype.itemsize, _PIECE_BYTES // dtype.itemsize

    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, count, step):
            yield files.read_part(name, start, min(step, count - start))

    return NewTensor(new_name, dtype, shape, pieces)


def _stacked(group: RoutedExperts, prefix: str, layout: str) -> list[NewTensor]:
    """The `wi` and `wo` of a group."""
    sizes = group.sizes
    try:
        shape = sizes.wi(layout)
    except ConfigError as error:
        raise ConfigError(f"{group.prefix} cannot be converted: {error}") from None

    def wi() -> Iterator[np.ndarray]:
        for matrix in np.argsort(places(layout, sizes.num_layers, sizes.num_experts), axis=None):
            yield group.wi(*divmod(int(matrix), sizes.num_experts))

    def wo() -> Iterator[np.ndarray]:
        for matrix in range(sizes.num_layers * sizes.num_experts):
            yield group.wo(*divmod(matrix, sizes.num_experts))

    return [
        NewTensor(f"{prefix}.wi", group.wi_dtype, shape, wi),
        NewTensor(f"{prefix}.wo", group.wo_dtype, sizes.wo, wo),
    ]


def _one_by_one(group: RoutedExperts, prefix: str) -> list[NewTensor]:
    """Gate, up and down of every expert of a group."""
    sizes = group.sizes
    if sizes.stack:
        raise ConfigError(
            f"{group.prefix} holds stacked layers {list(sizes.stack)}, and the per-expert layout has names for single layers only."
        )
    made = []
    for expert in range(sizes.num_experts):
        matrices = (
            (lambda e=expert: iter([unfuse(group.wi(0, e))[0]]), group.wi_dtype, (sizes.inner, sizes.hidden)),
            (lambda e=expert: iter([unfuse(group.wi(0, e))[1]]), group.wi_dtype, (sizes.inner, sizes.hidden)),
            (lambda e=expert: iter([group.wo(0, e).T]), group.wo_dtype, (sizes.hidden, sizes.inner)),
        )
        for role, (pieces, dtype, shape) in zip(expert_names(prefix), matrices, strict=True):
            made.append(NewTensor(f"{prefix}.{expert}.{role}.weight", dtype, shape, pieces))
    return made


def _copy_small_files(source: Path, target: Path) -> None:
    """Configuration, tokenizer, licence: what is neither a weight nor an index of weights. config.json, which makes it a model folder, is last."""
    files = [
        file
        for file in source.iterdir()
        if file.is_file()
        and any(fnmatchcase(file.name, pattern) for pattern in COPIED_FILES)
        and not file.name.endswith(".index.json")
    ]
    for file in sorted(files, key=lambda file: (file.name == "config.json", file.name)):
        shutil.copyfile(file, target / file.name)


def _put(partial: Path, target: Path) -> None:
    """Gives a complete folder the target's name; what had it before is removed."""
    if not target.exists() or not any(target.iterdir()):
        partial.replace(target)
        return
    old = partial.with_suffix(".replaced")
    target.replace(old)
    try:
        partial.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
