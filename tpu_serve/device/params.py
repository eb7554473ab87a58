"""One declaration per weight, many uses: random init, loading, abstract shapes, sharding, bytes.

A model describes its weights as a tree (nested dicts and lists) whose leaves are `ParamSpec`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tpu_serve.device.mesh import AxisRules, named_sharding

Transform = Callable[[list[np.ndarray]], np.ndarray]


def _only(arrays: list[np.ndarray]) -> np.ndarray:
    (array,) = arrays
    return array


def transposed(arrays: list[np.ndarray]) -> np.ndarray:
    """Checkpoints store linear weights `[out, in]`; we keep `[in, out]`."""
    return _only(arrays).T


@dataclass(frozen=True, slots=True)
class Source:
    """One way a weight may lie in a checkpoint.

    Attributes:
      keys: the tensors' names.
      transform: how they become the weight.
      shape: of each of the tensors. A transform may not notice two dimensions in the wrong order.
    """

    keys: tuple[str, ...]
    transform: Transform = _only
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A weight that does not exist yet.

    Attributes:
      shape: of the array on the device, over the whole mesh.
      dtype: of the array on the device.
      axes: a logical axis name per dimension, None for one that is never split.
      sources: the layouts in which checkpoints hold it, most usual first. The first one that is complete is read.
      scale: standard deviation of the random init; None means ones (norm weights).
      unpadded: the shape before `padded` filled it up with zeros at the ends; None where it did not.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...] = field(repr=False)
    scale: float | None = 0.02
    unpadded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} logical axes for shape {self.shape}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


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
    shares = (
        (named_sharding(mesh, rules, spec.axes, spec.shape).shard_shape(spec.shape), spec) for _, spec in iterate(specs)
    )
    return sum(math.prod(shape) * jnp.dtype(spec.dtype).itemsize for shape, spec in shares)


def num_params(specs: Any) -> int:
    return sum(math.prod(spec.shape) for _, spec in iterate(specs))


def padded(specs: Any, axis: str, multiple: int) -> Any:
    """The same tree with the dimensions of one logical axis filled up with zeros to a multiple.

    Checkpoints do not hold the padding: it is put behind what they give. Random weights are those of the tree without it.
    """

    def pad(_: str, spec: ParamSpec) -> ParamSpec:
        widths = [
            (0, -size % multiple if name == axis else 0) for name, size in zip(spec.axes, spec.shape, strict=True)
        ]
        if not any(end for _, end in widths):
            return spec
        shape = tuple(size + end for size, (_, end) in zip(spec.shape, widths, strict=True))
        sources = tuple(
            dataclasses.replace(one, transform=_then_pad(one.transform, spec.shape, widths)) for one in spec.sources
        )
        return dataclasses.replace(spec, shape=shape, sources=sources, unpadded=spec.unpadded or spec.shape)

    return map_specs(pad, specs)


def _then_pad(transform: Transform, shape: tuple[int, ...], widths: list[tuple[int, int]]) -> Transform:
    def padded_transform(arrays: list[np.ndarray]) -> np.ndarray:
        array = transform(arrays)
        # Anything else is handed on as it is: the loader names a shape that does not fit.
        return np.pad(array, widths) if array.shape == shape else array

    return padded_transform


def abstract(specs: Any, mesh: jax.sharding.Mesh, rules: AxisRules) -> Any:
    """Shapes, dtypes and shardings without arrays: what ahead-of-time compilation needs."""
    return map_specs(
        lambda _, spec: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=named_sharding(mesh, rules, spec.axes, spec.shape)
        ),
        specs,
    )


def random_array(path: str, spec: ParamSpec, seed: int) -> np.ndarray:
    """Random values that depend only on the seed, the weight's path and its shape without padding."""
    if spec.unpadded is not None:
        values = random_array(path, dataclasses.replace(spec, shape=spec.unpadded, unpadded=None), seed)
        return np.pad(values, [(0, size - given) for size, given in zip(spec.shape, spec.unpadded, strict=True)])
    if spec.scale is None:
        return np.ones(spec.shape, spec.dtype)
    generator = np.random.default_rng([seed & (2**63 - 1), zlib.crc32(path.encode())])
    return (generator.standard_normal(spec.shape, np.float32) * np.float32(spec.scale)).astype(spec.dtype)


def random_init(specs: Any, mesh: jax.sharding.Mesh, rules: AxisRules, seed: int = 0) -> Any:
    """A tree of device arrays with random values, placed as the specs say."""

    def place(path: str, spec: ParamSpec) -> jax.Array:
        sharding: NamedSharding = named_sharding(mesh, rules, spec.axes, spec.shape)
        return jax.device_put(random_array(path, spec, seed), sharding)

    return map_specs(place, specs)
