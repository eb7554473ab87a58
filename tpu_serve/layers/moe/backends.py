"""Implementations of the expert computation, and what is made of them for a model.

Every one computes `sum_k weights[t, k] * expert_e(x_t)` with e = expert_ids[t, k], and nothing for id -1; `expert.py` says what an expert
computes.
A backend is called with whole arrays, whatever devices they lie on. Those for one device are called so by `ExpertParallel`, once on each
device of a mesh with that device's experts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.layers.moe.expert import Expert
from tpu_serve.layers.moe.expert_parallel import ExpertParallel
from tpu_serve.layers.moe.fused import Fused
from tpu_serve.layers.moe.gathered import Gathered
from tpu_serve.layers.moe.grouped import Grouped
from tpu_serve.layers.moe.one_device import OneDevice
from tpu_serve.layers.moe.one_expert import run_expert
from tpu_serve.layers.moe.planned import Planned, Portable
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing
from tpu_serve.layers.product import rows_of
from tpu_serve.moe_plan.key import read_tiles
from tpu_serve.moe_plan.layer import MoELayer, Policy
from tpu_serve.moe_plan.lookup import Rows
from tpu_serve.moe_plan.planner import Planner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Dense(OneDevice):
    """Every expert on every token: the oracle. Costs num_experts / top_k times the work that is needed.

    Quantised experts are all widened at every call.
    """

    expert: Expert = field(default_factory=Expert)
    name: str = "dense"

    def weighted_sum(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        num_experts = len(weights.gate_up)
        chosen = routing.expert_ids[..., None] == jnp.arange(num_experts)  # [T, K, E]; id -1 matches none
        share = jnp.sum(jnp.where(chosen, routing.weights[..., None], 0.0), axis=1)
        weights = self.expert.all_widened(weights, x.dtype)
        gate_up = jnp.einsum("th,ezhi->tezi", x, weights.gate_up)
        bias = weights.gate_up_bias
        inner = self.expert.inner(
            gate_up[:, :, 0], gate_up[:, :, 1], None if bias is None else (bias[None, :, 0, 0], bias[None, :, 1, 0])
        )
        out = jnp.einsum("tei,eih->teh", inner.astype(x.dtype), weights.down).astype(jnp.float32)
        if weights.down_bias is not None:
            out += weights.down_bias[None, :, 0]
        return jnp.einsum("teh,te->th", out, share)


@dataclass(frozen=True)  # no slots: jax.jit keeps a weak reference to what it wraps
class Ragged(OneDevice):
    """Sort the assignments by expert, then one grouped product per projection.

    On TPU the grouped product is `jax.lax.ragged_dot`. On CPU, where XLA expands that into a product with every expert, each expert's rows are
    padded to blocks of rows and a loop runs over the blocks in use.

    Quantised experts are widened one at a time on CPU, those that have rows only. On TPU all experts of the device are at every call, whatever
    tokens there are: XLA's grouped product takes no other types, and nothing says which experts it will read. A layer takes as much memory
    as its weights have in the type of the tokens meanwhile, and writes and reads that much.
    """

    chip_is_tpu: bool
    expert: Expert = field(default_factory=Expert)
    name: str = "ragged"

    def weighted_sum(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        return (_ragged_dot if self.chip_is_tpu else _row_blocks)(x, routing, weights, self.expert)


def _sort_by_expert(expert_ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Assignments in order of expert, those without one last.

    Returns:
      order i32[A], the assignment at each sorted place; rank i32[A], the place of each assignment; counts i32[E].
    """
    ids = jnp.where(expert_ids < 0, num_experts, expert_ids).reshape(-1)
    order = jnp.argsort(ids, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    counts = jnp.sum(ids[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return order.astype(jnp.int32), rank.astype(jnp.int32), counts


def _combine(rows: jax.Array, routing: Routing) -> jax.Array:
    """Weighted sum over k of rows [T, K, H], f32[T, H]. Rows without an expert may hold anything."""
    valid = (routing.expert_ids >= 0)[..., None]
    return jnp.sum(jnp.where(valid, rows.astype(jnp.float32) * routing.weights[..., None], 0.0), axis=1)


def _ragged_dot(x: jax.Array, routing: Routing, weights: ExpertWeights, rule: Expert) -> jax.Array:
    weights = rule.all_widened(weights, x.dtype)
    top_k, (num_experts, _, hidden, inner) = routing.expert_ids.shape[1], weights.gate_up.shape
    order, rank, counts = _sort_by_expert(routing.expert_ids, num_experts)
    # Each expert's rows twice in a row, for its gate and for its up projection, so that [E, 2, H, I] serves as 2E matrices where it lies:
    # slicing the gates and the ups out of it would copy all weights at every call. Assignments without an expert come last.
    num_valid = counts.sum(keepdims=True)
    sizes = jnp.concatenate([counts, len(order) - num_valid])
    starts = jnp.concatenate([jnp.cumsum(counts) - counts, num_valid])
    expert = jnp.where(routing.expert_ids < 0, num_experts, routing.expert_ids).reshape(-1)[order]
    bias, biased = weights.gate_up_bias, jnp.minimum(expert, num_experts - 1)  # rows without an expert may have any
    gate_row = jnp.arange(len(order), dtype=jnp.int32) + starts[expert]
    up_row = gate_row + sizes[expert]
    token = jnp.zeros(2 * len(order), jnp.int32).at[gate_row].set(order // top_k).at[up_row].set(order // top_k)
    matrices = weights.gate_up.reshape(2 * num_experts, hidden, inner)
    both = jax.lax.ragged_dot(x[token], matrices, jnp.repeat(counts, 2), preferred_element_type=jnp.float32)
    biases = None if bias is None else (bias[biased, 0, 0], bias[biased, 1, 0])
    product = rule.inner(both[gate_row], both[up_row], biases).astype(x.dtype)
    out = jax.lax.ragged_dot(product, weights.down, counts, preferred_element_type=jnp.float32)
    if weights.down_bias is not None:
        out += weights.down_bias[biased, 0]
    return _combine(out[rank].reshape(len(x), top_k, hidden), routing)


def _block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows per block: about an expert's fair share, and no fewer than take the time of one."""
    return 16 if num_assignments <= 16 * num_experts else 32


def _row_blocks(x: jax.Array, routing: Routing, weights: ExpertWeights, rule: Expert) -> jax.Array:
    num_tokens, top_k = routing.expert_ids.shape
    num_experts, hidden = len(weights.gate_up), x.shape[1]
    num_assignments = num_tokens * top_k
    size = _block_rows(num_assignments, num_experts)
    num_blocks = min(num_assignments, num_assignments // size + num_experts)
    _, rank, counts = _sort_by_expert(routing.expert_ids, num_experts)
    blocks = -(-counts // size)
    blocks_end = jnp.cumsum(blocks)
    # Row of each assignment in the padded order: its expert's first block, then its place among the expert's rows.
    first_row, first_place = (blocks_end - blocks) * size, jnp.cumsum(counts) - counts
    ids = routing.expert_ids.reshape(-1)
    row = jnp.where(ids < 0, num_blocks * size, first_row[ids] + rank - first_place[ids])
    token = jnp.arange(num_assignments, dtype=jnp.int32) // top_k
    token_of_row = jnp.full(num_blocks * size, num_tokens, jnp.int32).at[row].set(token, mode="drop")
    expert_of_block = jnp.searchsorted(blocks_end, jnp.arange(num_blocks), side="right", method="compare_all")
    filled = jnp.pad(x, ((0, 1), (0, 0)))  # rows without a token are zeros

    def body(block: jax.Array, out: jax.Array) -> jax.Array:
        tokens = jax.lax.dynamic_slice_in_dim(token_of_row, block * size, size)
        done = run_expert(rows_of(filled, tokens), weights, expert_of_block[block], block, rule)
        return jax.lax.dynamic_update_slice_in_dim(out, done, block * size, axis=0)

    start = jnp.zeros((num_blocks * size, hidden), jnp.float32)
    out = jax.lax.fori_loop(0, blocks_end[-1], body, start)
    return _combine(out.at[row].get(mode="clip").reshape(num_tokens, top_k, hidden), routing)


def choose_backend(
    options: MoEOptions, config: MoEConfig, chip: Chip, mesh: Mesh, dtype: str, rows: Rows | None = None
) -> Planned:
    """The layer that is asked for, on the mesh. Which path each number of tokens takes is its plan's answer.

    Args:
      mesh: the devices that the experts are split over; a backend for one device runs on each of them.
      dtype: of the tokens, and of weights without a format.
      rows: of the chip's tuning tables.

    Raises:
      ConfigError: no backend, or not the one that is named, supports the layer, with its reason.
    """

    def everywhere(local: OneDevice) -> Portable:
        return local if mesh.size == 1 else ExpertParallel(local, mesh)

    if config.format is not None and config.format not in FORMATS:
        raise ConfigError(
            f"The experts' number format {config.format!r} is unknown; supported are {', '.join(FORMATS)}."
        )
    fused, expert = Fused(mesh, chip), Expert(config.activation, config.format)
    grouped = Grouped(options.moe_permute, options.moe_combine, options.moe_grouped_matmul, chip, expert)
    others = {
        "dense": everywhere(Dense(expert)),
        "ragged": everywhere(Ragged(chip.is_tpu, expert)),
        "grouped": everywhere(grouped),
        "gathered": everywhere(Gathered(expert)),
    }
    reasons = {name: backend.supports(config, chip) for name, backend in {"fused": fused, **others}.items()}
    policy = Policy(
        backend=options.moe_backend,
        tiles=read_tiles(options.tiles),
        unavailable={name: reason for name, reason in reasons.items() if reason is not None},
    )
    planner = Planner(layer_of(config, dtype), mesh.size, chip, policy, rows)
    planner.plan(1)  # refuses what no number of tokens can change
    name = options.moe_backend
    if name != "auto":  # otherwise the plans say it
        logger.info("MoE backend: %s", others[name].name if name in others else name)
    return Planned(planner, fused, others)


def layer_of(config: MoEConfig, dtype: str) -> MoELayer:
    """The layer of a model as plans know it.

    Args:
      dtype: of the tokens, and of weights without a format.
    """
    return MoELayer(
        config.num_experts,
        config.top_k,
        config.hidden,
        config.intermediate,
        format=config.format or dtype,
        dtype=dtype,
        activation=config.activation,
        gate_up_bias=config.has_biases,
        down_bias=config.has_biases,
    )
