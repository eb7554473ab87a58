"""Experts split over the devices of a mesh: each device computes what its own contribute, and the contributions are added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import EXPERT_AXIS, expert_mesh
from tpu_serve.layers.moe.one_device import OneDevice
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class ExpertParallel:
    """Runs a backend for one device on every device of a mesh, on that device's experts.

    Device d of D holds the experts from `d * E / D` on. Tokens and routing are the same on all devices, and so is the result. It is called
    with whole arrays, outside of any `shard_map`.

    Attributes:
      local: what computes one device's experts.
      mesh: of the model; its size must divide the number of experts in the weights.
    """

    local: OneDevice
    mesh: Mesh

    @property
    def name(self) -> str:
        return f"{self.local.name} on each of {self.mesh.size} devices"

    @property
    def padding(self) -> Mapping[str, int]:
        return self.local.padding

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        return self.local.supports(config, chip)

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        """[T, H] -> [T, H] in the type of x; the devices' parts are added in float32 and rounded once."""
        everywhere, by_expert = PartitionSpec(), PartitionSpec(EXPERT_AXIS)
        run = jax.shard_map(
            self._on_one_device,
            mesh=expert_mesh(self.mesh),
            in_specs=(everywhere, everywhere, by_expert),
            out_specs=everywhere,
            # Local backends start loops from constants, which this check would want declared as differing between devices.
            check_vma=False,
        )
        return run(x, routing, weights)

    def _on_one_device(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        num_experts = len(weights.gate_up)
        ids = routing.expert_ids - jax.lax.axis_index(EXPERT_AXIS) * num_experts
        mine = (ids >= 0) & (ids < num_experts)  # never -1, which stays negative
        here = Routing(jnp.where(mine, routing.weights, 0.0), jnp.where(mine, ids, -1))
        return jax.lax.psum(self.local.weighted_sum(x, here, weights), EXPERT_AXIS).astype(x.dtype)
