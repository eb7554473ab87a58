"""The kernel of the gated delta rule on a simulated device, both orders of copies, against a loop over tokens in float64.

Compiling it for the simulator takes far longer than running it, so each program meets several kinds of steps.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulator import FaultKind, KernelFault, Simulation

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.gated_delta_rule import reference
from tpu_serve.kernels.gated_delta_rule.cases import problem
from tpu_serve.kernels.gated_delta_rule.op import gated_delta_rule
from tpu_serve.kernels.gated_delta_rule.problem import Config, heuristic, supported
from tpu_serve.kernels.gated_delta_rule.states import States
from tpu_serve.layers.delta_rule_on_pool import choose

SIZE = 128


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_rows: int
    key_heads: int
    value_heads: int
    dtype: str = "float32"
    config: Config | None = None

    @property
    def num_states(self):
        return self.num_rows + 3

    @functools.cache  # noqa: B019
    def simulation(self):
        return self.traced_anew()

    def traced_anew(self):
        """Not from the cache, which holds programs without a fault."""
        context = functools.partial(Context, TPU_CHIPS["v6e"])
        return Simulation(lambda interpret, *arrays: gated_delta_rule(context(interpret), *arrays, config=self.config))

    def step(self, lengths, seed=0):
        """The arrays of a step: padding holds NaN, one row starts from zeros, one from a state that another row overwrites with its
        snapshot, and the last row leaves a snapshot too."""
        random = np.random.default_rng(seed)
        starts = np.cumsum([0, *lengths])
        cu = np.full(self.num_rows + 1, starts[-1], np.int32)
        cu[: len(starts)] = starts

        def tokens(*shape):
            values = random.normal(size=(self.num_tokens, *shape)).astype(np.float32)
            values[starts[-1] :] = np.nan
            return values.astype(jnp.dtype(self.dtype))

        q, k, v = (tokens(heads, SIZE) for heads in (self.key_heads, self.key_heads, self.value_heads))
        gates = self.num_tokens, self.value_heads
        log_decay = -np.exp(random.normal(-3, 2, gates)).astype(np.float32)
        log_decay[5::20] = -5000  # forgets all, and the small decays behind it still count in full
        beta = random.uniform(0, 1, gates).astype(np.float32)
        pool = random.normal(size=(self.num_states, self.value_heads, SIZE, SIZE)).astype(np.float32)
        order, count = random.permutation(self.num_states).astype(np.int32), len(lengths)
        read = np.full(self.num_rows, -1, np.int32)
        write, snapshot = (np.full(self.num_rows, self.num_states, np.int32) for _ in range(2))
        write[:count], read[:count] = order[:count], order[:count]
        if count > 2:
            read[1], read[2] = -1, order[-1]
            snapshot[0], snapshot[count - 1] = order[-1], order[-2]
        return [q, k, v, log_decay, beta, pool, cu, read, write, snapshot]

    def wanted(self, arrays):
        *tokens, pool, cu, read, write, snapshot = arrays
        return reference.step(tokens, pool, cu, read, (write, snapshot))


FULL = Case(144, 6, 1, 2)
# Heads without a neighbour that shares their key head, in two blocks; fewer slots than rows.
NARROW = Case(24, 7, 2, 2, "bfloat16", Config(8, 1, rows=2, slots=4))
STEPS = {
    "decodes": (FULL, [1, 1, 1]),
    "a chunk alone": (FULL, [144]),
    "decodes, then chunks that begin anywhere": (FULL, [1, 1, 3, 70, 60]),
    "nothing": (FULL, []),
    "more decodes than slots": (NARROW, [1] * 7),
    "more rows than slots in chunks": (NARROW, [2, 3, 1, 9, 2, 2, 3]),
    "both": (NARROW, [1, 1, 1, 17, 2]),
}


@pytest.mark.parametrize("name", STEPS)
def test_answers_and_states(name):
    case, lengths = STEPS[name]
    arrays = case.step(lengths, seed=len(lengths))
    answers, states = case.wanted(arrays)
    exact = case.dtype == "float32"
    untouched = np.setdiff1d(np.arange(case.num_states), np.concatenate(arrays[-2:]))
    for out, pool in case.simulation().run(*arrays):
        assert out.dtype == case.dtype
        np.testing.assert_allclose(np.asarray(out, np.float32), answers, atol=2e-6 if exact else 2e-2, rtol=0)
        np.testing.assert_allclose(pool, states, atol=2e-6 * np.abs(states).max() if exact else 2e-4, rtol=0)
        np.testing.assert_array_equal(pool[untouched], arrays[5][untouched])


def test_numbers_that_are_none_stay_in_their_row():
    lengths = [1, 1, 2, 9, 5]
    arrays = NARROW.step(lengths)
    simulation = NARROW.simulation()
    rows, cu = np.repeat(np.arange(len(lengths)), lengths), arrays[6]
    clean = simulation.run(*arrays, modes=["eager"])[0]
    for bad in (1, 3):
        spoilt = [np.array(array) for array in arrays]
        spoilt[2][cu[bad] : cu[bad + 1]] = np.nan
        out, pool = simulation.run(*spoilt, modes=["eager"], allow_nan=True)[0]
        out = np.asarray(out, np.float32)[: len(rows)]
        assert np.isnan(out[rows == bad]).all()
        np.testing.assert_array_equal(out[rows != bad], np.asarray(clean[0], np.float32)[: len(rows)][rows != bad])
        others = np.arange(len(pool)) != arrays[8][bad]
        others[arrays[9][bad] % len(pool)] &= arrays[9][bad] == len(pool)
        np.testing.assert_array_equal(pool[others], clean[1][others])


@pytest.mark.parametrize("name", ["wait_loaded", "wait_stored"])
def test_a_wait_less_is_noticed(monkeypatch, name):
    monkeypatch.setattr(States, name, lambda *arguments: None)
    with pytest.raises(KernelFault) as caught:
        NARROW.traced_anew().run(*NARROW.step([1] * 7), modes=["eager"], allow_nan=True)
    assert caught.value.kind is FaultKind.RACE


def test_a_snapshot_that_is_written_before_all_have_read_is_noticed(monkeypatch):
    store = States.store

    def store_twice(self, row, slot):
        store(self, row, slot)
        store(dataclasses.replace(self, write=self.snapshot), row, slot)

    wait = States.wait_stored

    def wait_twice(self, row, slot):
        wait(self, row, slot)
        wait(dataclasses.replace(self, write=self.snapshot), row, slot)

    monkeypatch.setattr(States, "store", store_twice)
    monkeypatch.setattr(States, "wait_stored", wait_twice)
    arrays = NARROW.step([1, 1, 2, 2])  # row 2 starts from what row 0 overwrites
    _, states = NARROW.wanted(arrays)
    _, pool = NARROW.traced_anew().run(*arrays, modes=["eager"])[0]
    assert np.abs(pool[arrays[8][2]] - states[arrays[8][2]]).max() > 0.1


def test_the_kernel_runs_where_it_can(caplog):
    p, chip = problem("Qwen3.5-397B-A17B", 8, 64, 64), TPU_CHIPS["tpu7x"]
    caplog.set_level("INFO")
    assert choose(p, chip) == "kernel"
    assert choose(p, dataclasses.replace(chip, name="cpu")) == "xla"
    assert choose(dataclasses.replace(p, key_dim=64), chip) == "xla"
    assert "heads of 64 x 128 are not 128 x 128" in caplog.text
    assert "12 tokens" in (supported(dataclasses.replace(p, num_tokens=12), chip) or "")
    assert "SMEM" in (supported(dataclasses.replace(p, num_rows=10**5), chip) or "")
    assert heuristic(problem("Qwen3.5-397B-A17B", 1, 64, 64)).key_heads == 2
    assert jax.devices()[0].platform == "cpu"
