"""One declaration per weight, many uses: random init, loading, abstract shapes, sharding, bytes.

A model describes its weights as a tree (nested dicts and lists) whose leaves are `ParamSpec`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from tpu_serve.device.mesh import AxisRules, named_sharding, num_repeats
from tpu_serve.device.quantised import MatrixFormat, QuantisedArray, num_array_bytes, quantise_array

Transform = Callable[[list[np.ndarray]], np.ndarray]


def _only(arrays: list[np.ndarray]) -> np.ndarray:
    (array,) = arrays
    return array


def transposed(arrays: list[np.ndarray]) -> np.ndarray:
    """Checkpoints store linear weights `[out, in]`; we keep `[in, out]`."""
    return _only(arrays).T


@dataclass(frozen=True, slots=True)
class Source:
    """One way a weight may lie in a checkpoint, and how it can be read a few rows at a time.

    A transform moves values and computes none. Where the weight has rows, it takes one array that holds any number of them:

    - `keys_per_row` n: n tensors after each other make one row of the weight's leading dimension; the array is [n * rows, *shape].
    - `row_axis`: the only tensor's values are the rows of this dimension of the weight, one after the other; the array is [rows, ...], the
      tensor's own dimensions where its first is that of the rows. A tensor that is taken as it is has the rows of its first dimension, and
      a `transposed` one those of its last, without being told.

    Attributes:
      keys: the tensors' names.
      transform: how they become the weight: of all arrays, or of one with rows.
      shape: of each of the tensors. A transform may not notice two dimensions in the wrong order.
      keys_per_row: 0 where rows are not made of tensors.
      row_axis: None where the transform needs all of the tensors.
    """

    keys: tuple[str, ...]
    transform: Transform = _only
    shape: tuple[int, ...] | None = None
    keys_per_row: int = 0
    row_axis: int | None = None

    @property
    def cut_axis(self) -> int | None:
        """The dimension of the weight along which it can be read in parts, None where it cannot; -1 is the last."""
        if self.keys_per_row:
            return 0
        if self.row_axis is not None or len(self.keys) != 1:
            return self.row_axis
        return 0 if self.transform is _only else -1 if self.transform is transposed else None


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array on the device: its shape and type over the whole mesh, and a logical axis name per dimension."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A dimension of which each unit is there several times, one beside the other.

    Attributes:
      axis: the dimension.
      unit: values that stay together.
      times: how often they are there.
    """

    axis: int
    unit: int
    times: int

    def origins(self, start: int, stop: int) -> np.ndarray:
        """Where the values of this range of the dimension come from."""
        place = np.arange(start, stop)
        return place // (self.unit * self.times) * self.unit + place % self.unit


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A weight that does not exist yet.

    Attributes:
      shape: of the array on the device, over the whole mesh.
      dtype: of the array on the device; of what is quantised where the weight has a format.
      axes: a logical axis name per dimension, None for one that is never split.
      sources: the layouts in which checkpoints hold it, most usual first. The first one that is complete is read.
      scale: standard deviation of the random init; None means ones (norm weights).
      unit: values along the named axes that are never parted, such as those of a head.
      unpadded: the shape before `padded` filled it up at the ends and `repeated` repeated it; None where neither did.
      repeat: what `repeated` did.
      format: of the matrices [K, N] in the last two dimensions; the weight is a `QuantisedArray` then, and only its leading dimensions are
        split. None for a plain array.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...] = field(repr=False)
    scale: float | None = 0.02
    unit: int = 1
    unpadded: tuple[int, ...] | None = None
    repeat: Repeat | None = None
    format: MatrixFormat | None = None

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} logical axes for shape {self.shape}")
        if self.format is not None and len(self.shape) < 3:
            raise ValueError(f"quantised weights are stacks of matrices, not {self.shape}")

    @property
    def arrays(self) -> tuple[ArraySpec, ...]:
        """The array, or values and scale of a quantised weight."""
        if self.format is None:
            return (ArraySpec(self.shape, self.dtype, self.axes),)
        return (
            ArraySpec(self.shape, self.format.dtype, self.axes),
            ArraySpec(self.format.scale_shape(self.shape), np.dtype(np.float32), self.format.scale_axes(self.axes)),
        )

    @property
    def given(self) -> tuple[int, ...]:
        """The shape in a checkpoint, without padding and repetitions."""
        return self.unpadded or self.shape

    @property
    def num_units(self) -> tuple[int, ...]:
        """What there is to be shared out along each dimension."""
        return tuple(
            size if axis is None else size // self.unit for axis, size in zip(self.axes, self.shape, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        return sum(num_array_bytes(array.shape, array.dtype) for array in self.arrays)

    def made_of(self, arrays: Sequence[Any]) -> Any:
        """The leaf of a tree of arrays: what `arrays` names, joined where there are two."""
        return arrays[0] if self.format is None else QuantisedArray(*arrays)

    def shardings(self, mesh: jax.sharding.Mesh, rules: AxisRules) -> tuple[NamedSharding, ...]:
        """One for each of `arrays`.

        Raises:
          ValueError: the mesh cannot split the weight so, or would cut through the matrices of a quantised one.
        """
        if self.format is not None and (cut := [axis for axis in self.axes[-2:] if axis in rules]):
            raise ValueError(f"axes {tuple(self.axes)} would split quantised matrices along {cut}")
        return tuple(named_sharding(mesh, rules, array.axes, array.shape) for array in self.arrays)


def iterate(specs: Any, path: str = "") -> Iterator[tuple[str, ParamSpec]]:
    """(dotted path, spec) of every leaf, in a fixed order."""
    if isinstance(specs, ParamSpec):
        yield path, specs
        return
    items = specs.items() if isinstance(specs, dict) else enumerate(specs)
    for key, value in items:
        yield from iterate(value, f"{path}.{key}" if path else str(key))


def map_specs(function: Callable[[str, ParamSpec], Any], specs: Any, path: str = "") -> Any:
    """The same tree with every spec replaced by `function(path, spec)`."""
    if isinstance(specs, ParamSpec):
        return function(path, specs)
    items = specs.items() if isinstance(specs, dict) else enumerate(specs)
    built = {key: map_specs(function, value, f"{path}.{key}" if path else str(key)) for key, value in items}
    return built if isinstance(specs, dict) else list(built.values())


def num_bytes(specs: Any) -> int:
    """Bytes of all weights, each counted once however many devices hold it."""
    return sum(spec.num_bytes for _, spec in iterate(specs))


def num_bytes_per_device(specs: Any, mesh: jax.sharding.Mesh, rules: AxisRules) -> int:
    """Bytes of what each device of the mesh holds: its share of the weights that are split, and all of the others."""
    return sum(
        num_array_bytes(sharding.shard_shape(array.shape), array.dtype)
        for _, spec in iterate(specs)
        for array, sharding in zip(spec.arrays, spec.shardings(mesh, rules), strict=True)
    )


def num_params(specs: Any) -> int:
    return sum(math.prod(spec.shape) for _, spec in iterate(specs))


def padded(specs: Any, axis: str, multiple: int) -> Any:
    """The same tree with the dimensions of one logical axis filled up with zeros to a multiple; the scales there are 1.

    Checkpoints do not hold the padding: it is put behind what they give. Random weights are those of the tree without it.
    """

    def pad(_: str, spec: ParamSpec) -> ParamSpec:
        shape = tuple(
            size + (-size % multiple if name == axis else 0) for name, size in zip(spec.axes, spec.shape, strict=True)
        )
        return spec if shape == spec.shape else dataclasses.replace(spec, shape=shape, unpadded=spec.given)

    return map_specs(pad, specs)


def repeated(specs: Any, axis: str, shares: int) -> Any:
    """The same tree with each unit of one logical axis as often as it takes for so many devices to have equally many.

    Copies lie side by side, so where units are read in groups, those of a group still lie beside their own. Checkpoints hold each unit once,
    and random weights are those of the tree without repetitions.
    """

    def repeat(_: str, spec: ParamSpec) -> ParamSpec:
        if axis not in spec.axes:
            return spec
        dim = spec.axes.index(axis)
        times = num_repeats(spec.shape[dim] // spec.unit, shares)
        if times == 1:
            return spec
        if spec.repeat is not None or spec.format is not None or spec.shape[dim] != spec.given[dim]:
            raise ValueError(f"a weight of shape {spec.shape} cannot be repeated along {axis!r}")
        shape = tuple(size * times if at == dim else size for at, size in enumerate(spec.shape))
        return dataclasses.replace(spec, shape=shape, unpadded=spec.given, repeat=Repeat(dim, spec.unit, times))

    return map_specs(repeat, specs)


def abstract(specs: Any, mesh: jax.sharding.Mesh, rules: AxisRules) -> Any:
    """Shapes, dtypes and shardings without arrays: what ahead-of-time compilation needs."""

    def describe(_: str, spec: ParamSpec) -> Any:
        return spec.made_of(
            [
                jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
                for array, sharding in zip(spec.arrays, spec.shardings(mesh, rules), strict=True)
            ]
        )

    return map_specs(describe, specs)


def random_array(path: str, spec: ParamSpec, seed: int) -> np.ndarray:
    """Random values in `dtype`, before any quantising, that depend only on the seed, the weight's path and its shape in a checkpoint."""
    if spec.scale is None:
        values = np.ones(spec.given, spec.dtype)
    else:
        generator = np.random.default_rng([seed & (2**63 - 1), zlib.crc32(path.encode())])
        values = (generator.standard_normal(spec.given, np.float32) * np.float32(spec.scale)).astype(spec.dtype)
    if (repeat := spec.repeat) is not None:
        values = values.take(repeat.origins(0, spec.shape[repeat.axis]), repeat.axis)
    return np.pad(values, [(0, size - given) for size, given in zip(spec.shape, values.shape, strict=True)])


def random_init(specs: Any, mesh: jax.sharding.Mesh, rules: AxisRules, seed: int = 0) -> Any:
    """A tree of device arrays with random values, placed as the specs say."""

    def place(path: str, spec: ParamSpec) -> Any:
        values = random_array(path, spec, seed)
        if spec.format is None:
            arrays: tuple[Any, ...] = (values,)
        else:
            quantised = quantise_array(values[tuple(map(slice, spec.given))], spec.shape, spec.format)
            arrays = quantised.values, quantised.scale
        return spec.made_of([jax.device_put(*pair) for pair in zip(arrays, spec.shardings(mesh, rules), strict=True)])

    return map_specs(place, specs)
