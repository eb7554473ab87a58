"""The layer from kernels for one device: sort rows by expert, multiply, add up."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import LANES, round_up
from tpu_serve.kernels.grouped_matmul.op import grouped_gate_up, grouped_matmul
from tpu_serve.kernels.moe_combine.op import Choice, combine, permute
from tpu_serve.layers.moe.expert import Expert
from tpu_serve.layers.moe.one_device import OneDevice
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 32
"""Of the number of rows: the most that any kernel here cuts at once, in any type."""


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Grouped(OneDevice):
    """Permute, products by group, combine; see `kernels/moe_combine` and `kernels/grouped_matmul`.

    Quantised experts are all widened at every call, at the cost that `backends.Ragged` has on TPU.

    Attributes:
      permute, combine: "auto", "tc" for the kernel, "onehot" for a product with a matrix of zeros and ones, "xla" for XLA's gathers.
      grouped_matmul: "auto", "tc" for the kernel, "xla" for `jax.lax.ragged_dot`.
      chip: of the device. On a CPU "auto" takes no kernel, and one that is asked for is simulated: right, and too slow for anything but tests.
    """

    permute: str
    combine: str
    grouped_matmul: str
    chip: Chip
    expert: Expert = field(default_factory=Expert)
    name: str = "grouped"

    @property
    def padding(self) -> Mapping[str, int]:
        """The kernels take whole lanes."""
        return MappingProxyType({"expert_hidden": LANES, "expert_inner": LANES})

    def supports(self, config: MoEConfig, chip: Chip) -> str | None:
        if config.has_biases:
            return f"{self.name} adds no biases, which this model's experts have; --moe-backend ragged does."
        return None

    def _context(self, part: str) -> Context:
        simulated = part == "tc" and not self.chip.is_tpu
        interpret: Any = pltpu.InterpretParams() if simulated else False
        return Context(self.chip, interpret)

    def weighted_sum(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        num_experts, _, hidden, _ = weights.gate_up.shape
        weights, ids = self.expert.all_widened(weights, x.dtype), routing.expert_ids
        num_rows = round_up(ids.size, ROW_MULTIPLE)
        wide = jnp.pad(x, ((0, 0), (0, hidden - x.shape[1])))  # the weights are padded for the kernels
        sizes = jnp.sum(ids.reshape(-1, 1) == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)
        rows = permute(wide, ids, Choice(self.permute, self._context(self.permute), num_experts), num_rows)
        matmul = "xla" if self.grouped_matmul == "auto" and not self.chip.is_tpu else self.grouped_matmul
        matmul = "tc" if matmul == "auto" else matmul
        context = self._context(matmul)
        _log_products(len(x), matmul)
        inner = grouped_gate_up(rows, weights.gate_up, sizes, self.expert.activation, context, backend=matmul)
        done = grouped_matmul(inner, weights.down, sizes, context, backend=matmul)
        choice = Choice(self.combine, self._context(self.combine), num_experts)
        return combine(done, ids, routing.weights, choice, "float32")[:, : x.shape[1]]


@functools.cache
def _log_products(num_tokens: int, backend: str) -> None:
    """Once for all layers of a program."""
    logger.info("MoE grouped products of %d tokens: %s", num_tokens, backend)
