"""The programs of a design: shapes of everything that a step takes, without an array of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.config import EngineConfig
from tpu_serve.device.mesh import replicated
from tpu_serve.device.params import abstract
from tpu_serve.device.sampler_state import SamplerState
from tpu_serve.engine.design import Design
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.layers.attention import pages_per_block
from tpu_serve.layers.attention_on_mesh import MeshAttention
from tpu_serve.layers.moe.routing import ExpertWeights, Routing
from tpu_serve.models.base import Experts
from tpu_serve.runner.programs import Allowed, DeviceState, Programs, StepFunction
from tpu_serve.scheduler.scheduler import num_slots


def make_programs(
    config: EngineConfig, design: Design, plan: EnginePlan, allowed: Allowed, experts: Experts | None = None
) -> Programs:
    """The step of every bucket of the plan, on the design's mesh.

    Args:
      experts: what runs them when it is not what was designed.
    """
    placement = design.placement
    mesh, rules, layout = placement.mesh, placement.rules, placement.cache_layout
    slots = num_slots(plan.max_num_seqs)
    function = StepFunction(
        design.model,
        experts or design.experts or _no_experts,
        MeshAttention(mesh, rules, placement.chip),
        layout.windows,
        allowed,
        config.sampling.logprobs_mode,
    )
    everywhere = replicated(mesh)
    state = DeviceState(
        layout.abstract(plan.num_pages, plan.page_size, slots + (plan.num_snapshots or 0), mesh, rules),
        _shape(jax.ShapeDtypeStruct((slots,), jnp.int32, sharding=everywhere)),
        SamplerState.abstract(slots, design.model.vocab_size, everywhere),
    )
    layouts = plan.layouts(slots, pages_per_block(plan.page_size))
    return Programs(function, layouts, abstract(placement.specs, mesh, rules), state)


def _shape(shape: jax.ShapeDtypeStruct) -> Any:
    """A shape where the field is declared as an array."""
    return shape


def _no_experts(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    raise AssertionError("a dense model calls no experts")
