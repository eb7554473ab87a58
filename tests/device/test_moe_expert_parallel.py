"""Experts split over devices compute what the same backend computes on one device, to the last rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.config import MoEOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.device.mesh import make_mesh
from tpu_serve.layers.moe.backends import Dense, Ragged, choose_backend
from tpu_serve.layers.moe.expert_parallel import ExpertParallel
from tpu_serve.layers.moe.routing import MoEConfig, Routing

BACKENDS = {"dense": Dense(), "row blocks": Ragged(chip_is_tpu=False), "ragged_dot": Ragged(chip_is_tpu=True)}
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 24, 10, 6, 3


def mesh(num_devices):
    return make_mesh(jax.devices()[:num_devices])


def problem(num_tokens=37, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[-4:] = -1  # padding rows
    shares = np.where(ids < 0, 0.0, rng.random(ids.shape)).astype(np.float32)
    x = jnp.asarray(rng.normal(0, 1, (num_tokens, HIDDEN)), dtype)
    gate_up = jnp.asarray(rng.normal(0, 0.2, (NUM_EXPERTS, 2, HIDDEN, INNER)), dtype)
    down = jnp.asarray(rng.normal(0, 0.2, (NUM_EXPERTS, INNER, HIDDEN)), dtype)
    return x, Routing(jnp.asarray(shares), jnp.asarray(ids)), ExpertWeights(gate_up, down)


def filled_up(weights, num_devices, value=0.0):
    """The weights with experts that no token goes to, as many as the devices need."""
    end = -NUM_EXPERTS % num_devices
    return jax.tree.map(
        lambda a: jnp.pad(a, [(0, end)] + [(0, 0)] * (a.ndim - 1), constant_values=np.asarray(value, a.dtype)), weights
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_devices", [2, 4])
def test_equals_one_device(backend, num_devices):
    local = BACKENDS[backend]
    x, routing, weights = problem()
    expected = jax.jit(local)(x, routing, weights)
    run = jax.jit(ExpertParallel(local, mesh(num_devices)))
    out = run(x, routing, filled_up(weights, num_devices))
    np.testing.assert_allclose(out, expected, atol=1e-6)
    assert np.asarray(expected[:-4]).any(axis=1).sum() > 25
    np.testing.assert_array_equal(out[-4:], np.zeros((4, HIDDEN)))
    # Whatever lies in the experts that are not there touches nothing.
    np.testing.assert_array_equal(out, run(x, routing, filled_up(weights, num_devices, 5.0)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_are_added_before_they_are_rounded(backend):
    local = BACKENDS[backend]
    x, routing, weights = problem(200, jnp.bfloat16)
    expected = jax.jit(local)(x, routing, weights)
    out = jax.jit(ExpertParallel(local, mesh(3)))(x, routing, weights)
    assert out.dtype == jnp.bfloat16
    # Float32 sums in another order: an element in hundreds of thousands lies so close to a tie that it rounds the other way.
    assert np.mean(np.asarray(out) == np.asarray(expected)) > 0.998


def test_a_device_gets_only_its_own_experts():
    seen = []

    class Spy(Dense):
        def weighted_sum(self, x, routing, weights):
            jax.debug.callback(lambda ids, shares: seen.append((ids, shares)), routing.expert_ids, routing.weights)
            assert weights.gate_up.shape == (NUM_EXPERTS // 2, 2, HIDDEN, INNER)
            return super().weighted_sum(x, routing, weights)

    x, routing, weights = problem()
    jax.jit(ExpertParallel(Spy(), mesh(2)))(x, routing, weights).block_until_ready()
    jax.effects_barrier()
    assert len(seen) == 2
    for ids, shares in seen:
        assert ids.min() == -1
        assert ids.max() == NUM_EXPERTS // 2 - 1
        assert not shares[ids < 0].any(), "no expert means weight 0"
    assert sum((ids >= 0).sum() for ids, _ in seen) == (routing.expert_ids >= 0).sum()


def test_choice_of_backend_on_several_devices(caplog):
    caplog.set_level("INFO")
    config = MoEConfig(NUM_EXPERTS, TOP_K, HIDDEN, INNER, True)

    def chosen(name, chip, num_devices):
        backend = choose_backend(MoEOptions(name), config, chip, mesh(num_devices), "float32")
        return backend.others[backend.planner.plan(64).path]

    assert chosen("ragged", TPU_CHIPS["v6e"], 2) == ExpertParallel(Ragged(chip_is_tpu=True), mesh(2))
    assert "MoE backend: ragged on each of 2 devices" in caplog.text
    assert chosen("auto", cpu_chip(), 2).name == "ragged on each of 2 devices"
    assert chosen("dense", cpu_chip(), 1) == Dense()
