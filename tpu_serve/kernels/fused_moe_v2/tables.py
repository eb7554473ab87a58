"""What mode G must know before it starts: who has which rows, in which order they are visited, and where they go.

Everything here is plain XLA on small integer arrays, run on every device inside `shard_map`.

Order of rows. Each device sorts its own (token, choice) slots by expert, stably: its *sorted slots*. The rows of expert e that come from device d
are one contiguous *run* of d's sorted slots. The expert's rows are its runs, one device after the other, and its finished rows travel back as
runs into the same places: what arrives at an owner lies in the order of the owner's own sorted slots, each row written exactly once.

A *visit* is a block of at most `block_rows` rows of one expert. Visits of a *round* need only tokens of the devices of that round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import pytree
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.legality import max_visits
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem, ceil_div, round_up

I32 = jnp.int32


@pytree
@dataclass(frozen=True, slots=True)
class Sorted:
    """The sorted slots of the group. S = T * K own slots of a device, rounded up; D devices.

    Attributes:
      tokens: i32[D, S], token of the group per sorted slot; 0 beyond the valid ones.
      weights: f32[D, S], routing weight per sorted slot.
      counts: i32[D, E], slots per expert (E over all devices).
      places: i32[D, T, K], place of each slot among its device's sorted slots; slots without an expert come last.
    """

    tokens: jax.Array
    weights: jax.Array
    counts: jax.Array
    places: jax.Array


def sort_slots(problem: Problem, device: Any, expert_ids: jax.Array, weights: jax.Array) -> Sorted:
    """One device's slots, without the leading D axis.

    Args:
      device: whose tokens they are.
      expert_ids: i32[T, K], -1 for none.
      weights: f32[T, K].
    """
    p = problem
    num_experts = p.local_experts * p.num_devices
    ids = jnp.where(expert_ids < 0, num_experts, expert_ids).reshape(-1)
    slots = jnp.arange(ids.size, dtype=I32)
    # Sorts that carry what is wanted along: gathers and scatters of single numbers are several times slower on a TPU.
    sorted_ids, order, sorted_weights = jax.lax.sort((ids, slots, weights.reshape(-1)), is_stable=True, num_keys=1)
    _, places = jax.lax.sort((order, slots), num_keys=1)
    counts = jnp.sum(ids[:, None] == jnp.arange(num_experts, dtype=I32), axis=0, dtype=I32)
    valid = sorted_ids < num_experts
    tokens = jnp.where(valid, device * p.local_tokens + order // p.top_k, 0)
    missing = slots_per_device(p) - len(order)
    return Sorted(
        jnp.pad(tokens, (0, missing)),
        jnp.pad(jnp.where(valid, sorted_weights, 0.0), (0, missing)),
        counts,
        places.reshape(expert_ids.shape),
    )


def slots_per_device(problem: Problem) -> int:
    return round_up(problem.local_tokens * problem.top_k, LANES)


VISIT_FIELDS = ("virtual", "first_row", "num_rows", "ordinal", "is_first", "is_last")


def kernel_tables(problem: Problem, config: Config, me: Any, everyone: Sorted) -> dict[str, jax.Array]:
    """The scalar tables of one device, flat i32 arrays for SMEM. V (round, expert) pairs, N visits at most.

    Returns:
      visits: [6 * N], the fields of `VISIT_FIELDS` one after the other.
      loads: [N], local expert of each load of a whole expert, by ordinal.
      totals: [3 + rounds], visits, loads of a tile, own slots with an expert, and the tokens that each round brings.
      run_start, run_count, run_first: [V * D], place of a run among its device's sorted slots, its rows, and its first row within the expert.
      run_target: [V * D], where its finished rows go: the same place at the owner, or a place in the local slab when rows are combined here.
    """
    p, rounds = problem, config.rounds
    experts = me * p.local_experts + jnp.arange(p.local_experts, dtype=I32)
    starts = jnp.cumsum(everyone.counts, axis=1, dtype=I32) - everyone.counts
    count, start = (array[:, experts].T for array in (everyone.counts, starts))  # [E, D] each
    distance = jax.lax.rem(me - jnp.arange(p.num_devices, dtype=I32) + p.num_devices, I32(p.num_devices))
    round_of_device = distance * rounds // p.num_devices
    here = round_of_device[None, :] == jnp.arange(rounds, dtype=I32)[:, None]  # [rounds, D]
    run_count = jnp.where(here[:, None, :], count[None], 0).reshape(-1, p.num_devices)
    run_start = jnp.broadcast_to(start[None], (rounds, *start.shape)).reshape(-1, p.num_devices)
    run_first = jnp.cumsum(run_count, axis=1, dtype=I32) - run_count
    rows = run_count.sum(axis=1, dtype=I32)
    slab_start = jnp.cumsum(rows, dtype=I32) - rows
    run_target = slab_start[:, None] + run_first if config.combine == "rs" else run_start

    visits, loads, num_visits, num_active = _visits(
        rows, config.block_rows, max_visits(p, config), config.keeps_experts(p)
    )
    loaded = num_active if config.keeps_experts(p) else num_visits
    totals = jnp.stack([num_visits, loaded * config.tiles_per_expert(p), everyone.counts[me].sum(dtype=I32)])
    return {
        "visits": visits.reshape(-1),
        "loads": jax.lax.rem(loads, I32(p.local_experts)),
        "totals": jnp.concatenate([totals, _arriving(p, config, me, everyone, here)]).astype(I32),
        "run_start": run_start.reshape(-1),
        "run_count": run_count.reshape(-1),
        "run_first": run_first.reshape(-1),
        "run_target": run_target.reshape(-1),
    }


def _visits(
    rows: jax.Array, block_rows: int, limit: int, keeps_experts: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Visits i32[6, N], loads i32[N], and how many visits and experts with rows there are; `rows` i32[V]."""
    blocks = -(-rows // block_rows)
    end = jnp.cumsum(blocks, dtype=I32)
    index = jnp.arange(limit, dtype=I32)
    virtual = jnp.searchsorted(end, index, side="right", method="compare_all").astype(I32)
    virtual = jnp.minimum(virtual, len(rows) - 1)
    active = jnp.cumsum(rows > 0, dtype=I32)
    first_block, num_blocks, all_rows, ordinals = _pick(virtual, end - blocks, blocks, rows, active - 1)
    block = index - first_block
    first_row = block * block_rows
    num_rows = jnp.clip(all_rows - first_row, 0, block_rows)
    if keeps_experts:  # an expert is loaded once, for all its visits
        ordinal, is_first, is_last = ordinals, block == 0, block == num_blocks - 1
        loads = jnp.searchsorted(active, index, side="right", method="compare_all").astype(I32)
    else:  # every visit loads its expert anew
        ordinal, is_first, is_last = index, jnp.ones_like(index), jnp.ones_like(index)
        loads = virtual
    fields = [virtual, first_row, num_rows, ordinal, is_first.astype(I32), is_last.astype(I32)]
    return jnp.stack(fields), jnp.minimum(loads, len(rows) - 1), end[-1], active[-1]


def _pick(index: jax.Array, *tables: jax.Array) -> list[jax.Array]:
    """tables[index], by comparing with every place: see `sort_slots`."""
    chosen = index[:, None] == jnp.arange(len(tables[0]), dtype=I32)
    return [jnp.sum(jnp.where(chosen, table, 0), axis=1, dtype=I32) for table in tables]


def _arriving(problem: Problem, config: Config, me: Any, everyone: Sorted, here: jax.Array) -> jax.Array:
    """Tokens that each round brings to this device, i32[rounds]."""
    p = problem
    if config.dispatch == "dedup_push":
        experts = me * p.local_experts + jnp.arange(p.local_experts, dtype=I32)
        per_device = _wanted(p, everyone, experts).sum(axis=1, dtype=I32)
    else:
        per_device = jnp.full(p.num_devices, p.local_tokens, I32)
    return jnp.sum(jnp.where(here, per_device[None, :], 0), axis=1, dtype=I32)


def _wanted(problem: Problem, everyone: Sorted, experts: jax.Array) -> jax.Array:
    """bool[D, T]: tokens of each device that have a slot at one of the experts, which lie side by side."""
    starts = jnp.cumsum(everyone.counts, axis=1, dtype=I32) - everyone.counts
    first, last = starts[:, experts[0]], starts[:, experts[-1]] + everyone.counts[:, experts[-1]]
    places = everyone.places
    return jnp.any((places >= first[:, None, None]) & (places < last[:, None, None]), axis=2)


def dedup_runs(problem: Problem, me: Any, everyone: Sorted) -> dict[str, jax.Array]:
    """Runs of own tokens that each device wants: every token crosses to a device once, neighbours together.

    Returns:
      send_first, send_count: i32[D * ceil(T / 2)], first token and length of each run, the runs of a device first in its part.
      send_runs, send_tokens: i32[D], runs and tokens for each device.
    """
    p = problem
    experts = jnp.arange(p.local_experts, dtype=I32)
    mine = jax.tree.map(lambda array: array[me][None], everyone)
    wanted = jnp.stack([_wanted(p, mine, device * p.local_experts + experts)[0] for device in range(p.num_devices)])
    before = jnp.pad(wanted[:, :-1], ((0, 0), (1, 0)))
    after = jnp.pad(wanted[:, 1:], ((0, 0), (0, 1)))
    token = jnp.arange(p.local_tokens, dtype=I32)[None]
    limit = ceil_div(p.local_tokens, 2)
    first = jnp.sort(jnp.where(wanted & ~before, token, p.local_tokens), axis=1)[:, :limit]
    last = jnp.sort(jnp.where(wanted & ~after, token, p.local_tokens), axis=1)[:, :limit]
    return {
        "send_first": first.reshape(-1),
        "send_count": (last - first + 1).reshape(-1),
        "send_runs": jnp.sum(first < p.local_tokens, axis=1, dtype=I32),
        "send_tokens": jnp.sum(wanted, axis=1, dtype=I32),
    }


def slab_places(problem: Problem, config: Config, me: Any, everyone: Sorted, tables: dict[str, jax.Array]) -> jax.Array:
    """Where each slot of the group lies in the local slab of finished rows, i32[D, T, K]; -1 for slots of other devices' experts."""
    p = problem
    ends = jnp.cumsum(everyone.counts, axis=1, dtype=I32)
    expert = jax.vmap(lambda end, place: jnp.searchsorted(end, place, side="right", method="compare_all"))(
        ends, everyone.places
    ).astype(I32)
    local = expert - me * p.local_experts
    is_local = (local >= 0) & (local < p.local_experts)
    device = jnp.arange(p.num_devices, dtype=I32)[:, None, None]
    distance = jax.lax.rem(me - device + p.num_devices, I32(p.num_devices))
    virtual = (distance * config.rounds // p.num_devices) * p.local_experts + jnp.where(is_local, local, 0)
    run = virtual * p.num_devices + device
    place = tables["run_target"][run] + everyone.places - tables["run_start"][run]
    return jnp.where(is_local, place, -1)
