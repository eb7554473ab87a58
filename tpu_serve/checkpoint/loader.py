"""From a checkpoint folder to a tree of device arrays, with every tensor on both sides accounted for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tpu_serve.checkpoint.accounting import TensorFiles, check_header, check_tied, choose_sources
from tpu_serve.checkpoint.placing import PIECE_BYTES, Share, Transfers
from tpu_serve.checkpoint.quantising import OnQuantised, RowQuantiser
from tpu_serve.checkpoint.reading import Box, WeightReader, grown
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import AxisRules
from tpu_serve.device.params import ParamSpec, iterate, map_specs

NUM_THREADS = 4
"""That read. One keeps a local disk busy; storage behind a network wants several requests at a time."""


def load_params(
    specs: Any,
    files: Path | TensorFiles,
    mesh: Mesh,
    rules: AxisRules,
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
    on_quantised: OnQuantised | None = None,
) -> Any:
    """The tree of `specs` as device arrays read from a checkpoint.

    Each weight comes from the first of its sources whose tensors all exist and have the shape that it names. Everything that can be
    known from the files' headers is checked before any value is read; an output table that should be the embedding is compared with it.
    A device's share of a weight is read, transformed and sent alone;
    the host holds about twice `PIECE_BYTES` of them, as far as sources can be read in parts. Weights with a format are quantised row by
    row from float32; where the checkpoint view has a method `stored` and what it gives fits the format, they keep every bit.

    Args:
      specs: nested dicts and lists of ParamSpec.
      files: a folder, or one that is open, or a view of one.
      ignore: patterns (`model.visual.*`) of tensors that the model knows and does not want.
      progress: called with (bytes read, bytes in all) of the checkpoint, at the start and after each piece of a weight.
      on_quantised: called with the path of each weight that has a format, and the relative error that this cost.

    Raises:
      ConfigError: weights without tensors, tensors that nobody wants, a shape or type that does not fit, a broken file, a value that is
        not finite and has to be quantised, or a mesh that cannot split a weight.
    """
    if isinstance(files, Path):
        files = SafetensorsFolder(files)
    sources = choose_sources(files, specs, ignore)
    for path, spec in iterate(specs):
        check_header(files, path, spec, sources[path])
    check_tied(files, sources)
    shardings = {path: _shardings(path, spec, mesh, rules) for path, spec in iterate(specs)}
    total = sum(files.num_bytes(key) for source in sources.values() for key in source.keys)
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    transfers = Transfers()
    with ThreadPoolExecutor(NUM_THREADS, "weights") as pool:

        def load(path: str, spec: ParamSpec) -> Any:
            reader = WeightReader(files, path, spec, sources[path], pool, NUM_THREADS)
            quantiser = None if spec.format is None else RowQuantiser(reader, spec.format)
            loaded = _load(reader, quantiser, shardings[path], transfers, report)
            if quantiser is not None and on_quantised is not None:
                on_quantised(path, quantiser.error)
            return loaded

        report(0)
        params = map_specs(load, specs)
    transfers.wait()
    return params


def _shardings(path: str, spec: ParamSpec, mesh: Mesh, rules: AxisRules) -> tuple[NamedSharding, ...]:
    try:
        return spec.shardings(mesh, rules)
    except ValueError as error:
        raise ConfigError(f"The weight {path} cannot be placed: {error}.") from None


def _load(
    reader: WeightReader,
    quantiser: RowQuantiser | None,
    shardings: tuple[NamedSharding, ...],
    transfers: Transfers,
    report: Callable[[int], None],
) -> Any:
    """One weight, share by share."""
    spec, axis = reader.spec, 0 if quantiser else reader.axis
    placed: list[list[jax.Array]] = [[] for _ in spec.arrays]
    num_given = math.prod(spec.given) * (1 if spec.repeat is None else spec.repeat.times)
    num_read = num_values = 0
    for box, devices in _shares(shardings[0], spec.shape):
        shares = [
            Share(sharding.shard_shape(array.shape), axis, devices, transfers)
            for array, sharding in zip(spec.arrays, shardings, strict=True)
        ]
        for piece in _pieces(box, axis, np.dtype(spec.arrays[0].dtype).itemsize):
            if quantiser is None:
                hosts: tuple[np.ndarray, ...] = (_plain(reader, piece),)
            else:
                hosts = quantiser.rows(piece[0].start, piece[0].stop)
            for share, host in zip(shares, hosts, strict=True):
                share.put(host, piece[axis].start - box[axis].start if piece else 0)
            num_values += math.prod(one.stop - one.start for one in _given(piece, spec))
            now = reader.num_bytes * num_values // max(1, num_given)
            report(now - num_read)
            num_read = now
        for arrays, share in zip(placed, shares, strict=True):
            arrays += share.arrays
    return spec.made_of(
        [
            jax.make_array_from_single_device_arrays(array.shape, sharding, arrays)
            for array, sharding, arrays in zip(spec.arrays, shardings, placed, strict=True)
        ]
    )


def _shares(sharding: NamedSharding, shape: tuple[int, ...]) -> Iterator[tuple[Box, list[jax.Device]]]:
    """The parts into which an array is split, and the devices that hold each."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        ends = tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
        holders.setdefault(ends, []).append(device)
    for ends, devices in holders.items():
        yield tuple(slice(*pair) for pair in ends), devices


def _pieces(box: Box, axis: int, item_bytes: int) -> Iterator[Box]:
    """A share in equal pieces along an axis, so that few programs have to be compiled that put them together."""
    num_bytes = item_bytes * math.prod(one.stop - one.start for one in box)
    if num_bytes <= PIECE_BYTES:
        yield box
        return
    start, stop = box[axis].start, box[axis].stop
    count = min(-(-num_bytes // PIECE_BYTES), stop - start)
    step = -(-(stop - start) // count)
    for at in range(start, stop, step):
        yield (*box[:axis], slice(at, min(at + step, stop)), *box[axis + 1 :])


def _given(box: Box, spec: ParamSpec) -> Box:
    """What of a part is not padding."""
    repeated = None if spec.repeat is None else spec.repeat.axis  # which has no padding
    return tuple(
        one if at == repeated else slice(min(one.start, size), min(one.stop, size))
        for at, (one, size) in enumerate(zip(box, spec.given, strict=True))
    )


def _plain(reader: WeightReader, box: Box) -> np.ndarray:
    """A part of a weight, with zeros behind what the checkpoint gives."""
    shape = tuple(one.stop - one.start for one in box)
    given = _given(box, reader.spec)
    if any(one.start == one.stop for one in given):
        return np.zeros(shape, np.dtype(reader.spec.dtype))
    if (repeat := reader.spec.repeat) is None:
        return grown(reader.read(given), shape)
    origins = repeat.origins(given[repeat.axis].start, given[repeat.axis].stop)
    start, stop = int(origins.min()), int(origins.max()) + 1
    values = reader.read((*given[: repeat.axis], slice(start, stop), *given[repeat.axis + 1 :]))
    return grown(values.take(origins - start, repeat.axis), shape)
