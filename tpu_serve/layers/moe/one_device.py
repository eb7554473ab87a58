"""What a backend for one device is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

import jax

from tpu_serve.device.chip import Chip
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing


class OneDevice(ABC):
    """A backend that knows of one device only."""

    name: str

    @property
    def padding(self) -> Mapping[str, int]:
        """Multiples to which axes of the expert weights are filled up when they are loaded."""
        return MappingProxyType({})

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        """What this backend lacks, whatever the number of tokens, or None. What all of them lack is `moe_plan.path.without_xla`'s answer."""
        return None

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        """[T, H] -> [T, H] in the type of x."""
        return self.weighted_sum(x, routing, weights).astype(x.dtype)

    @abstractmethod
    def weighted_sum(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        """[T, H] -> f32[T, H]: the sum as it was added up, before it is rounded to the type of x."""
