"""Chips to compile for on a machine that has none: libtpu's names, and the environment it wants."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS, slice_grid, slice_sizes

# libtpu looks for a TPU, a metadata server and a lock of its own unless told that there is nothing to find.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice of chips by the name libtpu knows it.

    Attributes:
      chip: name as in `device/chip.py`.
      grid: chips along each axis.
      num_devices: JAX devices wanted, which is fewer than there are only for one tpu7x device (its chip has two).
    """

    chip: str
    grid: tuple[int, ...]
    num_devices: int

    @property
    def name(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.grid))}"

    @property
    def host_bounds(self) -> tuple[int, int, int] | None:
        """Chips of a host. libtpu assumes 2x2x1, which a smaller slice is not divisible by; None leaves it at that."""
        if math.prod(self.grid) >= 4:
            return None
        x, y, *z = self.grid
        return (x, y, z[0] if z else 1)


def topology(chip: str, num_devices: int) -> Topology:
    """The slice of `num_devices` JAX devices.

    Raises:
      ConfigError: no such chip, or no slice of that size.
    """
    if chip not in TPU_CHIPS:
        raise ConfigError(f"cannot compile for chip {chip!r}; known are {', '.join(TPU_CHIPS)}.")
    grid = slice_grid(TPU_CHIPS[chip], num_devices)
    if grid is None:
        sizes = slice_sizes(TPU_CHIPS[chip])
        raise ConfigError(f"{chip} has no slice of {num_devices} devices; there are {', '.join(map(str, sizes))}.")
    return Topology(chip, grid, num_devices)


def known_topologies() -> list[str]:
    """Names of all slices, as in v6e:2x4."""
    found = [topology(name, size) for name, chip in TPU_CHIPS.items() for size in slice_sizes(chip)]
    return list(dict.fromkeys(one.name for one in found))


def topology_named(name: str) -> Topology:
    """The whole slice of that name, as in v6e:2x4.

    Raises:
      ConfigError: there is none; the message has those of the chip, or of all.
    """
    known = known_topologies()
    chip, _, grid = name.partition(":")
    if name not in known:
        same_chip = [one for one in known if one.startswith(f"{chip}:")]
        raise ConfigError(f"there is no topology {name!r}; there are {', '.join(same_chip or known)}.")
    sides = tuple(map(int, grid.split("x")))
    return Topology(chip, sides, math.prod(sides) * TPU_CHIPS[chip].devices_per_chip)


@contextlib.contextmanager
def environment(**more: str) -> Iterator[None]:
    """Sets libtpu's environment for a while. It counts when libtpu is first loaded, later changes are not seen."""
    wanted = ENVIRONMENT | more
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def target_devices(wanted: Topology, *, on_one_host: bool = False, flags: str = "") -> list[Any]:
    """Devices that programs can be compiled for and not run on, in the order JAX gives on such a slice.

    Args:
      on_one_host: all chips belong to one machine; libtpu assumes four on each otherwise.
      flags: for libtpu, besides those of the environment. Like the rest of it they count when libtpu is first loaded.

    Raises:
      ConfigError: libtpu is not installed, or refuses the slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("compiling for a TPU needs the package libtpu: pip install 'tpu-serve[tpu]'.")
    bounds = (*wanted.grid, 1, 1)[:3] if on_one_host else wanted.host_bounds
    options: dict[str, Any] = {} if bounds is None else {"chips_per_host_bounds": bounds}
    more = {"LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()} if flags else {}
    with environment(**more):
        try:
            described = topologies.get_topology_desc(platform="tpu", topology_name=wanted.name, **options)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"libtpu refuses the topology {wanted.name}: {str(error).splitlines()[0]}") from error
    return list(described.devices)[: wanted.num_devices]
