"""Which devices the model lies on, and how: whole on one, or split over several."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from tpu_serve.device.chip import Chip, chip_of
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.device.mesh import DEFAULT_RULES, AxisRules, make_mesh, num_shares, rules_that_divide
from tpu_serve.device.params import iterate, num_bytes_per_device, padded, repeated

logger = logging.getLogger(__name__)

FILLED = ("experts", "vocab", "mlp")
"""Logical axes that are filled up with what nobody asks for or what adds nothing, until the devices divide them."""
REPEATED = {"kv_heads": "heads", "linear_key_heads": "linear_heads"}
"""Logical axes whose units are read by those of another, each by equally many. If the devices divide the readers, then each holds what its own
read, the same as some other device perhaps."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where arrays lie.

    Attributes:
      chip: one of the devices, with the memory that is its own.
      mesh: the devices.
      rules: which logical axes are split over them.
      specs: of the weights, filled up and repeated as the devices need it.
      cache_layout: of the KV cache over all devices of a data rank, repeated likewise.
    """

    chip: Chip
    mesh: Mesh
    rules: AxisRules
    specs: Any
    cache_layout: CacheLayout

    @classmethod
    def over(cls, devices: Sequence[jax.Device], specs: Any, cache_layout: CacheLayout) -> Placement:
        """`on_mesh` of some devices, all of one kind.

        Raises:
          ConfigError: the devices are of a kind that is not supported.
        """
        return cls.on_mesh(chip_of(devices[0]), make_mesh(devices), specs, cache_layout)

    @classmethod
    def on_mesh(cls, chip: Chip, mesh: Mesh, specs: Any, cache_layout: CacheLayout) -> Placement:
        """Shares out what the devices can have equally much of, and copies the rest to each of them, which the log says.

        What is missing of `FILLED` axes is put behind the model's own, and what `REPEATED` axes have too few of is there several times.

        Args:
          chip: each of the devices, as if it were alone.
          mesh: the devices in a row, which need not be there; see `make_abstract_mesh`.
          specs: the model's weights.
          cache_layout: of the model.
        """
        if not chip.is_tpu:  # simulated devices share the host's memory
            chip = dataclasses.replace(chip, memory_bytes=chip.memory_bytes // mesh.size)
        for axis in FILLED:
            specs = padded(specs, axis, num_shares(mesh, DEFAULT_RULES[axis]))
        sizes = [pair for _, spec in iterate(specs) for pair in zip(spec.axes, spec.num_units, strict=True)]
        rules = rules_that_divide(mesh, DEFAULT_RULES, [pair for pair in sizes if pair[0] not in REPEATED])
        rules = {axis: name for axis, name in rules.items() if REPEATED.get(axis, axis) in rules}
        for axis in filter(rules.__contains__, REPEATED):
            before, shares = specs, num_shares(mesh, rules[axis])
            specs, cache_layout = repeated(specs, axis, shares), cache_layout.repeated(axis, shares)
            if specs != before:
                logger.info(
                    "Some %s lie on several of the %d devices, with those that read them: there are too few",
                    axis,
                    shares,
                )
        if copied := [axis for axis in DEFAULT_RULES if axis not in rules]:
            logger.info(
                "Every one of the %d devices holds all of these, which cannot be shared out evenly: %s",
                mesh.size,
                ", ".join(copied),
            )
        return cls(chip, mesh, rules, specs, cache_layout.for_chip(chip))

    def padded_for(self, padding: Mapping[str, int]) -> Placement:
        """The same with axes of the weights filled up to multiples, as what computes with them asks."""
        specs = self.specs
        for axis, multiple in padding.items():
            specs = padded(specs, axis, multiple)
        return dataclasses.replace(self, specs=specs)

    @property
    def param_bytes(self) -> int:
        """Weights on each device."""
        return num_bytes_per_device(self.specs, self.mesh, self.rules)

    @property
    def cache_on_one_device(self) -> CacheLayout:
        """What each device holds of the KV cache."""
        return self.cache_layout.on_one_device(self.mesh, self.rules)
