"""The fused expert-parallel kernel as a backend of the layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.device.chip import Chip
from tpu_serve.device.mesh import MODEL_AXIS
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic, mode_d_tokens
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing

if TYPE_CHECKING:
    from tpu_serve.layers.moe.backends import ExpertBackend

logger = logging.getLogger(__name__)

LEAST_GATHERED_TOKENS = 512
"""Tokens from which published measurements see kernels that gather rows ahead of XLA (eight tpu7x devices: 512 to 1024)."""

MOST_TOKENS = 32768
"""Largest number of tokens in a step that `supports` answers for."""


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Fused:
    """All experts of the mesh in one kernel call; see `kernels/fused_moe_v2`.

    Every device has all tokens, before and after. On a CPU the kernel is simulated: right, and far too slow for anything but tests.

    Attributes:
      config: of the layer.
      mesh: devices along the axis "model", over which the experts are split.
      chip: what they are.
      dtype: of the tokens and the weights.
    """

    config: MoEConfig
    mesh: Mesh
    chip: Chip
    dtype: str
    name: str = "fused"

    @property
    def padding(self) -> Mapping[str, int]:
        """Multiples to which axes of the expert weights are filled up when they are loaded."""
        multiple = self.problem(1).intermediate_multiple
        return MappingProxyType({"expert_hidden": LANES, "expert_inner": multiple})

    def problem(self, num_tokens: int) -> Problem:
        """What the kernel is asked for a step of so many tokens."""
        return Problem(
            num_tokens=num_tokens,
            num_experts=self.config.num_experts,
            top_k=self.config.top_k,
            hidden=self.config.hidden,
            intermediate=self.config.intermediate,
            num_devices=self.mesh.size,
            format=self.dtype,
            dtype=self.dtype,
            sequence_parallel=False,
        )

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        if config.has_scales:
            return f"{self.name} is not given the scales of quantised experts yet."
        if config.has_biases:
            return f"{self.name} is not given the biases that this model's experts have yet."
        num_tokens = 1
        while num_tokens <= MOST_TOKENS:
            try:
                heuristic(self.problem(num_tokens), chip)
            except ValueError as error:
                return f"for {num_tokens} tokens {error}."
            num_tokens *= 2
        return None

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        problem = self.problem(len(x))
        config = heuristic(problem, self.chip)
        logger.info("Fused MoE for %d tokens: mode %s, %s", len(x), config.mode, config)
        interpret: Any = False if self.chip.is_tpu else pltpu.InterpretParams()
        everywhere, by_expert = PartitionSpec(), PartitionSpec(MODEL_AXIS)
        run = jax.shard_map(
            partial(fused_moe_v2, problem=problem, config=config, call=Call(MODEL_AXIS, self.chip, interpret)),
            mesh=self.mesh,
            in_specs=(everywhere, everywhere, everywhere, by_expert),
            out_specs=everywhere,
            # The kernel's result is the same on every device because each receives the same rows, which no type can say.
            check_vma=False,
        )
        return run(x, routing.expert_ids, routing.weights.astype(jnp.float32), weights)


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class ByTokens:
    """The fused kernel where it pays, by the number of tokens in a step, and an XLA backend elsewhere.

    Without figures for a chip the rule is that of the regimes: so few tokens that mode D runs at the speed of reading the weights, or so many
    that gathering rows pays.

    Attributes:
      other: takes the steps between.
    """

    fused: Fused
    other: ExpertBackend

    @property
    def name(self) -> str:
        return f"fused, or {self.other.name} where that is not expected to pay"

    @property
    def padding(self) -> Mapping[str, int]:
        return self.fused.padding

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        return self.fused.supports(config, chip) or self.other.supports(config, chip)

    def reason_against(self, num_tokens: int) -> str | None:
        """Why the fused kernel does not run for so many tokens, or None."""
        problem = self.fused.problem(num_tokens)
        few = mode_d_tokens(problem, self.fused.chip)
        if few < num_tokens < LEAST_GATHERED_TOKENS:
            return f"{num_tokens} tokens are more than the {few} of mode D and fewer than the {LEAST_GATHERED_TOKENS} of mode G"
        return None

    def __call__(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        reason = self.reason_against(len(x))
        if reason is None:
            return self.fused(x, routing, weights)
        logger.info("MoE for %d tokens: %s, because %s", len(x), self.other.name, reason)
        hidden = x.shape[1]
        wide = jnp.pad(x, ((0, 0), (0, weights.gate_up.shape[2] - hidden)))  # the weights are padded for the kernel
        return self.other(wide, routing, weights)[:, :hidden]
