"""The programs of a design: shapes of everything that a step takes, without an array of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.config import EngineConfig
from tpu_serve.device.mesh import by_rank, num_data_ranks
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
        MeshAttention(mesh, rules, placement.chip, config.attention.attention_backend),
        layout.windows,
        allowed,
        config.sampling.logprobs_mode,
    )
    first, ranks = by_rank(mesh), num_data_ranks(mesh)
    state = DeviceState(
        layout.abstract(plan.num_pages, plan.page_size, slots + (plan.num_snapshots or 0), mesh, rules),
        _shape(jax.ShapeDtypeStruct((ranks * slots,), jnp.int32, sharding=first)),
        SamplerState.abstract(ranks * slots, design.model.vocab_size, first),
    )
    layouts = plan.layouts(slots, pages_per_block(plan.page_size))
    params = abstract(placement.specs, mesh, rules)
    return Programs(function, layouts, params, state, config.scheduler.num_decode_steps)


def _shape(shape: jax.ShapeDtypeStruct) -> Any:
    """A shape where the field is declared as an array."""
    return shape


def _no_experts(x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
    raise AssertionError("a dense model calls no experts")
