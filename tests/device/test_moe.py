"""Routing and the expert backends against a loop over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.device.mesh import make_mesh
from tpu_serve.layers.moe.backends import Dense, Ragged, choose_backend
from tpu_serve.layers.moe.gathered import Gathered
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing, route

ONE_DEVICE = make_mesh(jax.devices()[:1])
BACKENDS = {
    "dense": Dense(),
    "gathered": Gathered(),
    "row blocks": Ragged(chip_is_tpu=False),
    "ragged_dot": Ragged(chip_is_tpu=True),
}
HIDDEN, INNER = 24, 10


def loop(x, ids, shares, gate_up, down):
    x, gate_up, down = (np.asarray(a, np.float64) for a in (x, gate_up, down))
    out = np.zeros_like(x)
    for token in range(len(x)):
        for expert, share in zip(ids[token], shares[token], strict=True):
            if expert >= 0:
                gate, up = x[token] @ gate_up[expert, 0], x[token] @ gate_up[expert, 1]
                out[token] += share * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


def problem(num_tokens, num_experts, top_k, seed=0, skew=False):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    if skew:
        ids[:, 0] = 1
        ids[:, 1:][ids[:, 1:] == 1] = 0
    ids[rng.random(ids.shape) < 0.1] = -1
    return (
        rng.normal(0, 1, (num_tokens, HIDDEN)).astype(np.float32),
        ids,
        rng.random((num_tokens, top_k)).astype(np.float32),
        rng.normal(0, 0.2, (num_experts, 2, HIDDEN, INNER)).astype(np.float32),
        rng.normal(0, 0.2, (num_experts, INNER, HIDDEN)).astype(np.float32),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "skew"),
    [
        (1, 4, 2, False),
        (8, 8, 2, False),
        (33, 8, 2, True),
        (64, 5, 3, False),
        (200, 4, 1, False),
        (130, 3, 2, True),
        (8, 64, 8, False),
    ],
)
def test_backends_equal_the_loop(backend, num_tokens, num_experts, top_k, skew):
    x, ids, shares, gate_up, down = problem(num_tokens, num_experts, top_k, skew=skew)
    out = jax.jit(BACKENDS[backend])(x, Routing(shares, ids), ExpertWeights(gate_up, down))
    np.testing.assert_allclose(out, loop(x, ids, shares, gate_up, down), atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_expert_at_all_gives_zero_even_beside_nan_weights(backend):
    x, ids, shares, gate_up, down = problem(9, 4, 2)
    ids[:] = -1
    out = BACKENDS[backend](
        jnp.asarray(x), Routing(jnp.asarray(shares), jnp.asarray(ids)), ExpertWeights(gate_up, down)
    )
    np.testing.assert_array_equal(out, np.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend):
    x, ids, shares, gate_up, down = problem(40, 6, 2)
    x, gate_up, down = (jnp.asarray(a, jnp.bfloat16) for a in (x, gate_up, down))
    out = jax.jit(BACKENDS[backend])(x, Routing(shares, ids), ExpertWeights(gate_up, down))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), loop(x, ids, shares, gate_up, down), atol=0.03)


@pytest.mark.parametrize("renormalise", [False, True])
def test_routing(renormalise):
    rng = np.random.default_rng(3)
    x, router = rng.normal(0, 1, (12, HIDDEN)).astype(np.float32), rng.normal(0, 1, (HIDDEN, 7)).astype(np.float32)
    is_token = np.arange(12) < 9
    routing = route(x, router, MoEConfig(7, 3, HIDDEN, INNER, renormalise), is_token)
    logits = x.astype(np.float64) @ router.astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-probabilities, axis=1)[:, :3]
    expected = np.take_along_axis(probabilities, order, axis=1)
    if renormalise:
        expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(routing.expert_ids[:9], order[:9])
    np.testing.assert_allclose(routing.weights[:9], expected[:9], atol=1e-6)
    assert (routing.expert_ids[9:] == -1).all()
    assert (routing.weights[9:] == 0).all()


def test_choice_of_backend_is_logged_and_refusal_has_a_reason(caplog, monkeypatch):
    config = MoEConfig(4, 2, HIDDEN, INNER, True)
    caplog.set_level("INFO")

    def path(name, chip, num_tokens=64):
        return choose_backend(MoEOptions(name), config, chip, ONE_DEVICE, "float32").planner.plan(num_tokens).path

    assert path("auto", cpu_chip()) == "ragged"
    assert path("auto", TPU_CHIPS["v6e"]) == "ragged"
    assert path("dense", cpu_chip()) == "dense"
    assert "MoE backend: dense" in caplog.text
    monkeypatch.setattr(Ragged, "supports", lambda self, config, chip: "it is Sunday")
    assert path("auto", cpu_chip()) == "dense"
    backend = choose_backend(MoEOptions("auto"), config, cpu_chip(), ONE_DEVICE, "float32")
    assert ("ragged", "it is Sunday") in backend.planner.plan(64).refusals
    with pytest.raises(ConfigError, match="--moe-backend ragged cannot run this model: it is Sunday"):
        choose_backend(MoEOptions("ragged"), config, cpu_chip(), ONE_DEVICE, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sorted_by_expert_on_a_cpu_no_call_copies_the_experts(dtype):
    """XLA's CPU backend would convert all bfloat16 experts to float32 before a loop that takes one at a time."""
    num_experts, hidden, inner = 16, 256, 512
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    weights = ExpertWeights(shape(num_experts, 2, hidden, inner), shape(num_experts, inner, hidden))
    routing = Routing(shape(8, 2, dtype="float32"), shape(8, 2, dtype="int32"))
    compiled = jax.jit(Ragged(chip_is_tpu=False)).lower(shape(8, hidden), routing, weights).compile()
    one_expert_in_float32 = 3 * hidden * inner * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * one_expert_in_float32
