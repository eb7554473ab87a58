"""The fused expert-parallel kernel on the mesh of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import EXPERT_AXIS, expert_mesh
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import LANES
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of
from tpu_serve.moe_plan.plan import MoEPlan


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Fused:
    """All experts of the mesh in one kernel call; see `kernels/fused_moe_v2`.

    Every device has all tokens, before and after. On a CPU the kernel is simulated: right, and far too slow for anything but tests.

    Attributes:
      mesh: of the model; the experts are split over all of its devices.
      chip: what they are.
      name: as in `--moe-backend`.
    """

    mesh: Mesh
    chip: Chip
    name: str = "fused"

    def padding(self, layer: MoELayer) -> Mapping[str, int]:
        """Multiples to which axes of the expert weights are filled up when they are loaded; `moe_plan.layer.kernel_shapes` has what comes of it.

        Rows of scales have no such axis: as many are loaded as `kernel_shapes` has, whatever they hold beyond the blocks of the true sizes.
        """
        multiple = problem_of(layer, 1, self.mesh.size, Policy()).intermediate_multiple
        return MappingProxyType({"expert_hidden": LANES, "expert_inner": multiple})

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        """What this layer lacks, whatever the number of tokens; the rest is the plan's question."""
        return None

    def run(self, plan: MoEPlan, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        """[T, H] -> [T, H] in the type of x, by a plan that takes the kernel for T tokens.

        Args:
          weights: shaped as `moe_plan.layer.kernel_shapes` says, scales and biases in float32.

        Raises:
          ValueError: an array does not fit the plan's problem.
        """
        assert plan.config is not None
        interpret: Any = False if self.chip.is_tpu else pltpu.InterpretParams()
        everywhere, by_expert = PartitionSpec(), PartitionSpec(EXPERT_AXIS)
        call = Call(EXPERT_AXIS, self.chip, interpret)
        run = jax.shard_map(
            partial(fused_moe_v2, problem=plan.problem, config=plan.config, call=call),
            mesh=expert_mesh(self.mesh),
            in_specs=(everywhere, everywhere, everywhere, by_expert),  # matrices, scales and biases all begin with E
            out_specs=everywhere,
            # The kernel's result is the same on every device because each receives the same rows, which no type can say.
            check_vma=False,
        )
        return run(x, routing.expert_ids, routing.weights.astype(jnp.float32), weights)
