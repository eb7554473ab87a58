"""The mesh of devices, and which logical axis of an array is split over which of its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...]
"""What one dimension of an array is split over: a mesh axis, or several of them, the first one outermost."""
AxisRules = Mapping[str, MeshAxes]
"""Logical axis name to mesh axes; a name that is absent is not split."""

DATA_AXIS, MODEL_AXIS = "data", "model"
"""Devices along the data axis hold different sequences; those along the model axis share the work on each of them."""
EXPERT_AXIS = "expert"
"""All devices of the mesh in one row: experts are shared out among them, whatever else they do."""

DEFAULT_RULES: AxisRules = {
    "vocab": MODEL_AXIS,
    "heads": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "linear_heads": MODEL_AXIS,
    "linear_key_heads": MODEL_AXIS,
    "mlp": MODEL_AXIS,
    "experts": (DATA_AXIS, MODEL_AXIS),
    "ranks": DATA_AXIS,
}
"""What is split over what, unless a size forbids it; the axis "ranks" is that of pages, slots and whatever else each data rank has its own of."""


def make_mesh(devices: Sequence[jax.Device], data_parallel_size: int = 1) -> Mesh:
    """Devices that lie beside each other share a model; `data_parallel_size` must divide their number."""
    return Mesh(np.asarray(devices).reshape(data_parallel_size, -1), (DATA_AXIS, MODEL_AXIS))


def make_abstract_mesh(num_devices: int, data_parallel_size: int = 1) -> Mesh:
    """A mesh of devices that are not there: it has a size and splits shapes as that of `make_mesh` would, and holds no arrays."""
    shape = data_parallel_size, num_devices // data_parallel_size
    return cast(Mesh, AbstractMesh(shape, (DATA_AXIS, MODEL_AXIS)))


def expert_mesh(mesh: Mesh) -> Mesh:
    """The devices of a mesh in one row along `EXPERT_AXIS`, in the order in which the rule of "experts" shares out."""
    if isinstance(mesh, AbstractMesh):
        return cast(Mesh, AbstractMesh((mesh.size,), (EXPERT_AXIS,)))
    return Mesh(mesh.devices.reshape(-1), (EXPERT_AXIS,))


def num_data_ranks(mesh: Mesh) -> int:
    """Groups of devices that hold different sequences."""
    return int(mesh.shape[DATA_AXIS])


def data_axis(mesh: Mesh) -> str | None:
    """What the first axis of an array that has a part for each data rank is split over; None for a single rank, which has all of it."""
    return DATA_AXIS if num_data_ranks(mesh) > 1 else None


def by_rank(mesh: Mesh) -> NamedSharding:
    """Sharding of such an array."""
    axis = data_axis(mesh)
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(axis))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def num_shares(mesh: Mesh, axes: MeshAxes) -> int:
    """Parts that a dimension split over these mesh axes has."""
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def num_repeats(count: int, shares: int) -> int:
    """How often each of `count` things is there, side by side, where so many holders are to have equally many of them."""
    return shares // math.gcd(count, shares)


def rules_that_divide(mesh: Mesh, rules: AxisRules, sizes: Iterable[tuple[str | None, int]]) -> AxisRules:
    """The rules without those of the logical axes that have a size which its mesh axes do not divide.

    Args:
      sizes: (logical axis, size), of every dimension there is and of whatever else must not be cut through.
    """
    uneven = {
        axis for axis, size in sizes if axis is not None and axis in rules and size % num_shares(mesh, rules[axis])
    }
    return {axis: name for axis, name in rules.items() if axis not in uneven}


def named_sharding(mesh: Mesh, rules: AxisRules, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Sharding of an array with these logical axes.

    Raises:
      ValueError: a dimension is not a multiple of the mesh axes it should be split over, or two dimensions want one mesh axis.
    """
    names = [rules.get(axis) if axis is not None else None for axis in axes]
    used = [one for name in names if name is not None for one in ((name,) if isinstance(name, str) else name)]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {tuple(axes)} put two dimensions on one mesh axis: {names}")
    for axis, name, size in zip(axes, names, shape, strict=True):
        if name is not None and size % (count := num_shares(mesh, name)):
            raise ValueError(f"axis {axis!r} of size {size} cannot be split over {count} devices of mesh axis {name!r}")
    return NamedSharding(mesh, PartitionSpec(*names))
