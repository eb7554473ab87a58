"""Ways in which devices that exchange rows could fail one another: late, idle or uneven ones, one layer right after another, bytes miscounted."""

import functools

import fused_moe_inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_moe_mutants import Case, arguments, layer, wrong
from jax.sharding import Mesh, PartitionSpec
from simulator import Simulation, delayed

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2 import op, reference, tables, tolerance
from tpu_serve.kernels.fused_moe_v2.buffers import max_rows
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import COMBINES, DISPATCHES, Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem

LONGEST_DELAY = 0.3  # seconds; an undelayed device is through its part of these kernels sooner


def _problem(num_tokens, num_experts, num_devices, **fields):
    sizes = {"top_k": 2, "hidden": 128, "intermediate": 256, "format": "float32", "dtype": "float32"}
    return Problem(num_tokens, num_experts, num_devices=num_devices, **(sizes | fields))


def _gathered(dispatch, combine, num_devices):
    rounds = 1 if dispatch == "xla_ag" else num_devices - 1
    return Config(
        "G", 128, ring_slots=2, block_rows=32, tile_rows=32, dispatch=dispatch, combine=combine, rounds=rounds
    )


pytestmark = pytest.mark.usefixtures("plain_sums")

# Neither tokens nor experts can be divided among the devices: the last one of three has neither, of six the last two have no experts.
THREE, SIX = _problem(5, 4, 3), _problem(16, 8, 6, top_k=1)
CASES = {
    "D": Case(THREE, Config("D", 128, ring_slots=2)),
    "D, all tokens everywhere": Case(_problem(5, 4, 3, sequence_parallel=False), Config("D", 256)),
    **{
        f"G, {dispatch}, {combine}": Case(THREE, _gathered(dispatch, combine, 3))
        for dispatch in DISPATCHES
        for combine in COMBINES
    },
    "G in two stages": Case(THREE, _gathered("push_ag", "push", 3), in_two_stages=True),
    "D, six devices": Case(SIX, Config("D", 256), "idle device"),
    "G, six devices": Case(SIX, _gathered("push_ag", "push", 6), "idle device"),
}


@pytest.mark.parametrize("name", CASES)
def test_late_and_idle_devices_change_nothing(name):
    case, seconds = CASES[name], [0.0] * CASES[name].problem.num_devices

    def late(one_layer, x, *arrays):
        return one_layer(delayed(x, "model", seconds), *arrays)

    simulation, arrays = Simulation(layer(case, around=late)), arguments(case)
    in_time, eager = simulation.run(*arrays)
    assert wrong(case, in_time) is None
    np.testing.assert_array_equal(eager, in_time)
    for seed, mode in enumerate(("on_wait", "eager", "eager")):
        seconds[:] = np.random.default_rng(seed).uniform(0, LONGEST_DELAY, len(seconds))
        (output,) = simulation.run(*arrays, modes=(mode,))
        np.testing.assert_array_equal(output, in_time, err_msg=f"delays {seconds}")


@pytest.mark.parametrize("config", [Config("D", 256), _gathered("push_ag", "push", 2)], ids=["D", "G"])
def test_a_layer_takes_nothing_from_the_one_before(config):
    problem = _problem(8, 4, 2)
    inputs = [fused_moe_inputs.make(problem, seed, routing) for seed, routing in ((0, "uniform"), (1, "partial"))]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *[one.arguments[1:] for one in inputs])
    seconds = [0.0, 0.0]

    def two_layers(interpret, x, layers):
        mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
        call = Call("model", cpu_chip(), interpret)

        def one_device(x, layers):
            def next_layer(x, one):
                late = delayed(x, "model", seconds)
                return op.fused_moe_v2(late, *one, problem=problem, config=config, call=call), None

            return jax.lax.scan(next_layer, x, layers)[0]

        rows, later = PartitionSpec("model"), PartitionSpec(None, "model")
        return jax.shard_map(one_device, mesh=mesh, in_specs=(rows, later), out_specs=rows, check_vma=False)(x, layers)

    expected = inputs[0].x
    for one in inputs:
        expected = reference.dense(problem, expected, *one.arguments[1:])
    simulation = Simulation(two_layers)
    for delays in ([0.0, 0.0], [0.0, LONGEST_DELAY], [LONGEST_DELAY, 0.0]):
        seconds[:] = delays
        for output in simulation.run(inputs[0].x, stacked):
            assert tolerance.errors(output, expected).within(tolerance.TOLERANCES["float32"])


# Bytes: what is sent to a device is what it waits for.

CONFIGS = {
    "one block": Config("G", 128, dispatch="dedup_push", rounds=2),
    "blocks": Config("G", 128, ring_slots=2, block_rows=32, tile_rows=32, dispatch="dedup_push", rounds=3),
}
ROUTINGS = (*fused_moe_inputs.ROUTINGS, "the same expert again and again")
TABLES = pytest.mark.parametrize(("num_devices", "config"), [(3, "one block"), (3, "blocks"), (6, "blocks")])


def _table_problem(num_devices):
    return _problem(100, 8, num_devices, top_k=3)


def _expert_ids(problem, routing):
    if routing in fused_moe_inputs.ROUTINGS:
        return np.asarray(arguments(Case(problem, CONFIGS["blocks"], routing))[1])
    return np.zeros((problem.group_tokens, problem.top_k), np.int32)


@functools.cache
def _maker(problem, config):
    p, devices = problem, jnp.arange(problem.num_devices, dtype=jnp.int32)
    shape = (p.num_devices, p.local_tokens, p.top_k)

    @jax.jit
    def made(ids):
        _, ids, weights = op.normal_form(p, None, ids, jnp.ones(ids.shape))
        slots = devices, ids.reshape(shape), weights.reshape(shape)
        everyone = jax.vmap(functools.partial(tables.sort_slots, p))(*slots)

        def of(me):
            return tables.kernel_tables(p, config, me, everyone) | tables.dedup_runs(p, me, everyone)

        return everyone, jax.vmap(of)(devices)

    return made


def _tables(problem, config, routing):
    """The sorted slots of the group and every device's tables, as NumPy arrays."""
    made = _maker(problem, config)(_expert_ids(problem, routing))
    return jax.tree.map(np.asarray, made)


def _visits(made, device):
    """The fields of a device's visits, [6, visits]."""
    fields = made["visits"][device].reshape(len(tables.VISIT_FIELDS), -1)
    assert made["totals"][device, 0] <= fields.shape[1]
    return fields[:, : made["totals"][device, 0]]


@pytest.mark.parametrize("routing", ROUTINGS)
@TABLES
def test_each_device_waits_for_the_rows_that_are_sent_to_it(num_devices, config, routing):
    p, config = _table_problem(num_devices), CONFIGS[config]
    everyone, made = _tables(p, config, routing)
    delivered = np.zeros((p.num_devices, p.local_tokens * p.top_k), int)
    for sender in range(p.num_devices):
        names = ("run_first", "run_count", "run_target")
        first, count, target = (made[name][sender].reshape(-1, p.num_devices) for name in names)
        assert count.sum() <= max_rows(p)
        for virtual, begin, num_rows in _visits(made, sender)[:3].T:
            assert 1 <= num_rows <= config.block_rows
            for owner in range(p.num_devices):
                start, rows = first[virtual, owner], count[virtual, owner]
                low = max(begin, start)
                length = max(min(begin + num_rows, start + rows) - low, 0)
                place = target[virtual, owner] + low - start
                delivered[owner, place : place + length] += 1
    expected = made["totals"][:, 2]
    np.testing.assert_array_equal(everyone.counts.sum(axis=1), expected)
    np.testing.assert_array_equal(delivered, np.arange(delivered.shape[1]) < expected[:, None])


@pytest.mark.parametrize("routing", ROUTINGS)
@TABLES
def test_each_device_waits_for_the_tokens_that_are_sent_to_it(num_devices, config, routing):
    p, config = _table_problem(num_devices), CONFIGS[config]
    _, made = _tables(p, config, routing)
    owners = _expert_ids(p, routing).reshape(p.num_devices, p.local_tokens, p.top_k) // p.local_experts
    for receiver in range(p.num_devices):
        arriving = np.zeros(config.rounds, int)
        for distance in range(p.num_devices):
            sender = (receiver - distance) % p.num_devices
            first, count = (
                made[name][sender].reshape(p.num_devices, -1)[receiver] for name in ("send_first", "send_count")
            )
            runs = range(made["send_runs"][sender, receiver])
            sent = [token for run in runs for token in range(first[run], first[run] + count[run])]
            assert sent == list(np.flatnonzero((owners[sender] == receiver).any(axis=1)))
            assert made["send_tokens"][sender, receiver] == len(sent)
            arriving[distance * config.rounds // p.num_devices] += len(sent)
        np.testing.assert_array_equal(made["totals"][receiver, 3:], arriving)


@pytest.mark.parametrize("routing", ROUTINGS)
@TABLES
def test_the_ring_is_filled_with_as_many_tiles_as_are_read(num_devices, config, routing):
    p, config = _table_problem(num_devices), CONFIGS[config]
    _, made = _tables(p, config, routing)
    for device in range(p.num_devices):
        virtual, _, _, ordinal, is_first, is_last = _visits(made, device)
        assert made["totals"][device, 1] == is_first.sum() * config.tiles_per_expert(p)
        assert is_last.sum() == is_first.sum() == len(set(ordinal))
        np.testing.assert_array_equal(made["loads"][device][ordinal], virtual % p.local_experts)
