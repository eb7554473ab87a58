"""What one expert computes, whatever backend brings its rows together: how its weights are read, and what lies between its projections."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.fused_moe_v2.tile import activate
from tpu_serve.layers.moe.routing import ExpertWeights

F32 = jnp.float32


@dataclass(frozen=True)
class Expert:
    """`down(activation(gate(x) + bias, up(x) + bias)) + bias` for weights of a format.

    Quantised weights are widened to the type of the tokens before they meet them: rows are never quantised here, also where the kernel does
    that in the same format.

    Attributes:
      activation: between the projections.
      format: name in `fused_moe_v2.formats.FORMATS`; None for weights without scales.
    """

    activation: Activation = field(default_factory=Activation)
    format: str | None = None

    def all_widened(self, weights: ExpertWeights, dtype: Any) -> ExpertWeights:
        """`widened` of every expert, one after the other: all at once, XLA would write out a scale for every value in float32."""
        if weights.gate_up_scale is None:
            return self.widened(weights, dtype)
        return jax.lax.map(lambda one: self.widened(one, dtype), weights)

    def widened(self, weights: ExpertWeights, dtype: Any) -> ExpertWeights:
        """The matrices as values times scales, in float32 and rounded once to `dtype`; biases as they are. Nothing happens to matrices that
        have no scales and are of that type.

        Args:
          weights: of all experts or of one, whose arrays lack the axis E.

        Raises:
          ValueError: there are scales, of which the format says nothing; or fewer of them than the matrix has blocks.
        """
        down_scale = None if weights.down_scale is None else weights.down_scale[..., 0, :]
        return dataclasses.replace(
            weights,
            gate_up=self._widened(weights.gate_up, weights.gate_up_scale, dtype),
            down=self._widened(weights.down, down_scale, dtype),
            gate_up_scale=None,
            down_scale=None,
        )

    def _widened(self, values: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
        """[..., K, N] of values [..., K, N] and scale f32[..., B or more, N]."""
        if scale is None:
            return values.astype(dtype)
        if self.format is None or not FORMATS[self.format].scaled:
            raise ValueError(f"weights with scales need a format that has such, not {self.format}")
        num_rows, form = values.shape[-2], FORMATS[self.format]
        if scale.shape[-2] < form.num_blocks(num_rows):
            raise ValueError(
                f"{num_rows} rows of format {self.format} have {form.num_blocks(num_rows)} scales a column, "
                f"got {scale.shape[-2]}"
            )
        by_row = scale[..., :1, :] if form.block is None else jnp.repeat(scale, form.block, -2)[..., :num_rows, :]
        return (values.astype(F32) * by_row).astype(dtype)

    def inner(self, gate: jax.Array, up: jax.Array, biases: tuple[jax.Array, jax.Array] | None = None) -> jax.Array:
        """What enters the second product, from both halves of the first one and what is added to them; all of shapes that go together.

        In float32, but for SiLU of halves without biases, which stays in their type: products in bfloat16 are rounded to that before.
        """
        if biases is not None:
            gate, up = gate.astype(F32) + biases[0], up.astype(F32) + biases[1]
        if self.activation.name == "silu":
            return jax.nn.silu(gate) * up
        return activate(gate.astype(F32), up.astype(F32), self.activation)
