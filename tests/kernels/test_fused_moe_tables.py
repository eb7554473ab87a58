"""The tables of mode G against plain loops: every row once, in its place, and both ends of an exchange of one mind."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_moe_schedule import Slot, Visit, round_of, slots_of, visits_of, wanted_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2 import tables
from tpu_serve.kernels.fused_moe_v2.buffers import max_rows
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.gather import Visits
from tpu_serve.kernels.fused_moe_v2.legality import check, max_visits, smem_bytes
from tpu_serve.kernels.fused_moe_v2.problem import Problem

SMALL = Config("G", 128, 2, block_rows=32, tile_rows=32)
# T, E, K, H, I, D. H only matters for sizes; I gives the tiles of an expert.
SHAPES = [
    (Problem(70, 3, 2, 128, 256, 1), SMALL),
    (Problem(97, 7, 1, 128, 256, 3), Config("G", 128, 4, 32, 32, "dedup_push", "push", 2)),
    (Problem(50, 8, 4, 128, 384, 4), Config("G", 128, 2, 64, 32, "dedup_push", "rs", 4)),
    (Problem(13, 16, 10, 128, 128, 6), Config("G", 128, 2, 32, 32, "dedup_push", "push", 4)),
    (Problem(61, 30, 8, 128, 384, 8), Config("G", 128, 3, 32, 32, "push_ag", "rs", 8)),
]


@dataclass(frozen=True)
class Made:
    """All tables of the group: `of[device]` by name, `pieces[device]` [N, D, 4] as the kernel reads them."""

    everyone: tables.Sorted
    of: list[dict[str, np.ndarray]]
    places: list[np.ndarray]
    pieces: list[np.ndarray]


@functools.cache
def _program(problem: Problem, config: Config) -> Any:
    def make(expert_ids: jax.Array, routing_weights: jax.Array) -> Any:
        p = problem
        devices = jnp.arange(p.num_devices, dtype=jnp.int32)
        everyone = jax.vmap(functools.partial(tables.sort_slots, p))(devices, expert_ids, routing_weights)

        def one(me: jax.Array) -> Any:
            scalars = tables.kernel_tables(p, config, me, everyone)
            if config.dispatch == "dedup_push":
                scalars |= tables.dedup_runs(p, me, everyone)
            piece = Visits(p, scalars).piece
            pieces = jax.vmap(lambda visit: jax.vmap(lambda owner: jnp.stack(piece(visit, owner)))(devices))(
                jnp.arange(max_visits(p, config), dtype=jnp.int32)
            )
            places = tables.slab_places(p, config, me, everyone, scalars) if config.combine == "rs" else me
            return scalars, places, pieces

        return everyone, jax.vmap(one)(devices)

    return jax.jit(make)


def make(problem: Problem, config: Config, expert_ids: np.ndarray, routing_weights: np.ndarray) -> Made:
    p = problem
    by_device = (p.num_devices, p.local_tokens, p.top_k)
    ids, weights = jnp.asarray(expert_ids.reshape(by_device)), jnp.asarray(routing_weights.reshape(by_device))
    everyone, (scalars, places, pieces) = jax.tree.map(np.asarray, _program(problem, config)(ids, weights))
    of = [{name: array[device] for name, array in scalars.items()} for device in range(p.num_devices)]
    return Made(everyone, of, list(places), list(pieces))


def targets_of(config: Config, visits: list[Visit]) -> dict[Slot, int]:
    """Where finished rows go: to their places at the owner, or in order of visits where they stay."""
    slots = [slot for visit in visits for slot in visit.slots]
    return {slot: slot.place if config.combine == "push" else index for index, slot in enumerate(slots)}


@st.composite
def routed(draw: Any) -> Any:
    """A shape, its ids [G, K], mostly few experts so that there are long visits, and weights that tell all slots apart."""
    problem, config = draw(st.sampled_from(SHAPES))
    p = problem
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    likely = random.random(p.num_experts) ** draw(st.sampled_from([0, 4, 30])) + 1e-9
    ids = np.full((p.group_tokens, p.top_k), -1, np.int32)
    for token in range(p.num_tokens):
        ids[token] = random.choice(p.num_experts, p.top_k, replace=False, p=likely / likely.sum())
    ids[random.random(ids.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -1
    ids[random.random(len(ids)) < draw(st.sampled_from([0.0, 0.5]))] = -1
    if p.top_k > 1 and p.top_k <= p.local_experts and draw(st.booleans()):
        ids[:, -1] = ids[:, 0]
    weights = (1 + np.arange(ids.size, dtype=np.float32)).reshape(ids.shape)
    return problem, config, ids, weights


@settings(max_examples=30, deadline=None, derandomize=True)
@given(routed())
def test_tables_say_what_plain_loops_say(case):
    problem, config, ids, weights = case
    p, made = problem, make(*case)
    arrived: dict[int, list[int]] = {owner: [] for owner in range(p.num_devices)}
    for device in range(p.num_devices):
        visits = visits_of(p, config, device, ids)
        _check_slots(p, made, device, ids, weights)
        _check_visits(p, config, made, device, visits)
        _check_loads(p, config, made.of[device], visits, device)
        for slot, target in targets_of(config, visits).items():
            arrived[slot.owner if config.combine == "push" else device].append(target)
        if config.combine == "rs":
            _check_slab(p, config, made.places[device], visits)
    for targets in arrived.values():
        assert sorted(targets) == list(range(len(targets)))
    _check_arrivals(p, config, made, ids)


def _check_slots(p: Problem, made: Made, device: int, ids: np.ndarray, weights: np.ndarray) -> None:
    slots, everyone = slots_of(p, device, ids), made.everyone
    assert made.of[device]["totals"][2] == len(slots)
    first = device * p.local_tokens
    for slot in slots:
        assert everyone.places[device, slot.token, slot.choice] == slot.place
        assert everyone.tokens[device, slot.place] == first + slot.token
        assert everyone.weights[device, slot.place] == weights[first + slot.token, slot.choice]
    assert not everyone.tokens[device, len(slots) :].any()
    assert not everyone.weights[device, len(slots) :].any()
    assert sorted(everyone.places[device].reshape(-1)) == list(range(p.local_tokens * p.top_k))
    counts = [sum(slot.expert == expert for slot in slots) for expert in range(p.num_experts)]
    assert everyone.counts[device, : p.num_experts].tolist() == counts
    assert not everyone.counts[device, p.num_experts :].any()


def _check_visits(p: Problem, config: Config, made: Made, device: int, visits: list[Visit]) -> None:
    """Each visit's pieces, as the kernel reads them, are that visit's rows in order, and lead where those belong."""
    fields = dict(zip(tables.VISIT_FIELDS, made.of[device]["visits"].reshape(6, -1), strict=True))
    assert made.of[device]["totals"][0] == len(visits) <= max_visits(p, config)
    targets = targets_of(config, visits)
    keeps, ordinal, pair = config.keeps_experts(p), -1, None
    for number, visit in enumerate(visits):
        seen = {}
        for owner, (length, row, place, target) in enumerate(made.pieces[device][number]):
            for index in range(length):
                seen[row + index] = (owner, place + index, target + index)
        expected = [(slot.owner, slot.place, targets[slot]) for slot in visit.slots]
        assert [seen[row] for row in sorted(seen)] == expected
        assert sorted(seen) == list(range(len(expected)))
        found = {name: int(values[number]) for name, values in fields.items()}
        assert found["num_rows"] == len(visit.slots)
        assert found["virtual"] == visit.round * p.local_experts + visit.expert - device * p.local_experts
        is_first = pair != (visit.round, visit.expert) or not keeps
        pair = (visit.round, visit.expert)
        following = visits[number + 1] if number + 1 < len(visits) else None
        ordinal += is_first
        assert found["ordinal"] == ordinal
        assert found["is_first"] == is_first
        assert found["is_last"] == (not keeps or following is None or pair != (following.round, following.expert))


def _check_loads(p: Problem, config: Config, of: dict[str, np.ndarray], visits: list[Visit], device: int) -> None:
    """Which expert is read when: anew for each visit, or once for all its visits of a round."""
    experts = [visit.expert - device * p.local_experts for visit in visits]
    if config.keeps_experts(p):
        pairs = [(visit.round, visit.expert) for visit in visits]
        experts = [experts[at] for at in range(len(pairs)) if at == 0 or pairs[at] != pairs[at - 1]]
    assert of["loads"][: len(experts)].tolist() == experts
    assert of["totals"][1] == len(experts) * config.tiles_per_expert(p)


def _check_slab(p: Problem, config: Config, places: np.ndarray, visits: list[Visit]) -> None:
    expected = np.full((p.num_devices, p.local_tokens, p.top_k), -1)
    slots = [slot for visit in visits for slot in visit.slots]
    for place, slot in enumerate(slots):
        expected[slot.owner, slot.token, slot.choice] = place
    np.testing.assert_array_equal(places, expected)
    assert len(slots) <= max_rows(p)


def _check_arrivals(p: Problem, config: Config, made: Made, ids: np.ndarray) -> None:
    """Tokens that a device counts on in a round are those that its owners send it then, each once."""
    for device in range(p.num_devices):
        coming = [0] * config.rounds
        for owner in range(p.num_devices):
            sent = p.local_tokens
            if config.dispatch == "dedup_push":
                sent = _check_runs(p, made.of[owner], device, wanted_tokens(p, owner, device, ids))
            coming[round_of(p, config, device, owner)] += sent
        assert made.of[device]["totals"][3:].tolist() == coming


def _check_runs(p: Problem, of: dict[str, np.ndarray], device: int, wanted: list[int]) -> int:
    limit = len(of["send_first"]) // p.num_devices
    runs = range(device * limit, device * limit + of["send_runs"][device])
    assert len(runs) <= limit
    sent = [int(of["send_first"][run]) + index for run in runs for index in range(of["send_count"][run])]
    assert sent == wanted
    assert of["send_tokens"][device] == len(wanted)
    ends = [int(of["send_first"][run] + of["send_count"][run]) for run in runs]
    assert all(end < of["send_first"][run + 1] for end, run in zip(ends, runs[:-1], strict=False)), (
        "neighbours go together"
    )
    return len(sent)


@pytest.mark.parametrize("combine", ["push", "rs"])
def test_the_largest_layer_fits_its_tables(combine):
    """32,768 tokens, 512 experts, on one of 8 devices, in the worst routing: every token at as many of its experts as it can."""
    p = Problem(32768, 512, 8, 4096, 1024, 8, format="fp8_channel")
    config = Config("G", 256, 3, block_rows=256, tile_rows=128, dispatch="dedup_push", combine=combine, rounds=4)
    assert check(p, config, TPU_CHIPS["tpu7x"]) is None
    random = np.random.default_rng(0)
    by_device = (p.num_devices, p.local_tokens, p.top_k)
    ids = (random.random((p.num_tokens, 8)).argsort(axis=1) + 8 * random.integers(8, size=(p.num_tokens, 1))).astype(
        np.int32
    )
    weights = jnp.ones(by_device, jnp.float32)

    @jax.jit
    def tables_of_device_0(expert_ids: jax.Array) -> Any:
        devices, me = jnp.arange(p.num_devices, dtype=jnp.int32), jnp.int32(0)
        everyone = jax.vmap(functools.partial(tables.sort_slots, p))(devices, expert_ids, weights)
        scalars = tables.kernel_tables(p, config, me, everyone) | tables.dedup_runs(p, me, everyone)
        places = tables.slab_places(p, config, me, everyone, scalars) if combine == "rs" else everyone.places
        return scalars, places

    scalars, places = jax.tree.map(np.asarray, tables_of_device_0(jnp.asarray(ids.reshape(by_device))))
    assert scalars["totals"][2] == p.local_tokens * p.top_k
    assert scalars["totals"][3:].sum() == p.num_tokens
    counts = np.bincount(ids.reshape(-1), minlength=64)
    num_rows = scalars["visits"].reshape(6, -1)[2]
    assert num_rows.sum() == counts.sum() == max_rows(p)
    assert scalars["totals"][0] == np.count_nonzero(num_rows) <= max_visits(p, config)
    assert np.unique(places).size == (max_rows(p) if combine == "rs" else p.local_tokens * p.top_k)
    table_bytes = sum(array.nbytes for array in scalars.values())
    assert table_bytes <= smem_bytes(p, config) <= TPU_CHIPS["tpu7x"].smem_bytes
