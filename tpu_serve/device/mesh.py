"""Devices in a row, and which logical axis of an array is split over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

AxisRules = Mapping[str, str]
"""Logical axis name to mesh axis name; a name that is absent is not split."""

MODEL_AXIS = "model"

DEFAULT_RULES: AxisRules = {
    "vocab": MODEL_AXIS,
    "heads": MODEL_AXIS,
    "kv_heads": MODEL_AXIS,
    "linear_heads": MODEL_AXIS,
    "mlp": MODEL_AXIS,
    "experts": MODEL_AXIS,
}


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """All devices in one row along the model axis."""
    return Mesh(np.asarray(devices), (MODEL_AXIS,))


def make_abstract_mesh(num_devices: int) -> Mesh:
    """A row of devices that are not there: it has a size and splits shapes as `make_mesh` would, and holds no arrays."""
    return cast(Mesh, AbstractMesh((num_devices,), (MODEL_AXIS,)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def rules_that_divide(mesh: Mesh, rules: AxisRules, sizes: Iterable[tuple[str | None, int]]) -> AxisRules:
    """The rules without those of the logical axes that have a size which its mesh axis does not divide.

    Args:
      sizes: (logical axis, size), of every dimension there is and of whatever else must not be cut through.
    """
    uneven = {axis for axis, size in sizes if axis is not None and axis in rules and size % mesh.shape[rules[axis]]}
    return {axis: name for axis, name in rules.items() if axis not in uneven}


def named_sharding(mesh: Mesh, rules: AxisRules, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Sharding of an array with these logical axes.

    Raises:
      ValueError: a dimension is not a multiple of the mesh axis it should be split over, or two dimensions want one mesh axis.
    """
    names = [rules.get(axis) if axis is not None else None for axis in axes]
    used = [name for name in names if name is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {tuple(axes)} put two dimensions on one mesh axis: {names}")
    for axis, name, size in zip(axes, names, shape, strict=True):
        if name is not None and size % mesh.shape[name]:
            raise ValueError(
                f"axis {axis!r} of size {size} cannot be split over {mesh.shape[name]} devices of mesh axis {name!r}"
            )
    return NamedSharding(mesh, PartitionSpec(*names))
