"""The layer as it is planned: for each number of tokens the implementation that its plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import jax
import jax.numpy as jnp

from tpu_serve.device.mesh import by_rank, num_data_ranks
from tpu_serve.layers.moe.expert_parallel import ExpertParallel
from tpu_serve.layers.moe.fused import Fused
from tpu_serve.layers.moe.one_device import OneDevice
from tpu_serve.layers.moe.routing import ExpertWeights, Routing
from tpu_serve.moe_plan.planner import Planner

Portable = OneDevice | ExpertParallel


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Planned:
    """What a model calls for its experts.

    A plan is looked up while a program is traced, never in a step; the server has all of them made before.

    Attributes:
      planner: answers for every number of tokens.
      fused: the kernel on the mesh.
      others: the other paths by their names in `moe_plan.path.PATHS`.
    """

    planner: Planner = field(hash=False)
    fused: Fused
    others: Mapping[str, Portable] = field(hash=False)

    @property
    def padding(self) -> Mapping[str, int]:
        """Multiples to which logical axes of the expert weights must be filled up with zeros when they are loaded."""
        # Whole lanes on a TPU whatever runs there: XLA chooses an order of the dimensions in which it has to fill up least, and would turn
        # weights round in every step.
        if self.planner.may_run_kernel or self.fused.chip.is_tpu:
            return self.fused.padding(self.planner.layer)
        chosen = self.others.get(self.planner.policy.backend)
        return MappingProxyType({}) if chosen is None else chosen.padding

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        """[T, H] -> [T, H] in the type of x, T being the tokens of all data ranks. Every device gets all of them for its experts, and
        afterwards each rank goes on with its own."""
        out = self._run(x, routing, weights)
        mesh = self.fused.mesh
        return out if num_data_ranks(mesh) == 1 else jax.lax.with_sharding_constraint(out, by_rank(mesh))

    def _run(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        plan = self.planner.plan(len(x))
        if plan.path == "fused":
            return self.fused.run(plan, x, routing, weights)
        hidden = x.shape[1]
        wide = jnp.pad(x, ((0, 0), (0, weights.gate_up.shape[2] - hidden)))  # the weights may be padded for the kernel
        return self.others[plan.path](wide, routing, weights)[:, :hidden]
