"""Every model family against goldens made with transformers: logits, hidden states, routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES, LOGIT_TOLERANCE, MODELS

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import abstract, num_bytes, num_params, random_init
from tpu_serve.hf_config import read_config
from tpu_serve.layers.moe.backends import Dense, Ragged
from tpu_serve.models.registry import build_model

BACKENDS = {
    "dense": Dense(),
    "ragged blocks": Ragged(chip_is_tpu=False),
    "ragged_dot": Ragged(chip_is_tpu=True),
}


def causal_attention(q, k, v, cache):
    """Plain attention over one whole sequence, written independently of the paged one."""
    group = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v), cache


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request):
    folder = FIXTURES / request.param
    model = build_model(read_config(folder))
    params = load_params(
        model.param_specs(jnp.float32),
        folder,
        make_mesh(jax.devices()[:1]),
        DEFAULT_RULES,
        ignore=model.ignored_weights,
    )
    return model, params, np.load(folder / "golden.npz")


ROWS = 144
"""Every prompt is padded to this, so that one program a backend and model serves all tests."""


@functools.cache
def compiled(model, backend):
    def run(params, token_ids, num_tokens):
        is_token = jnp.arange(ROWS) < num_tokens
        positions = jnp.where(is_token, jnp.arange(ROWS), 0)
        caches = [None] * model.cache_layout(jnp.float32).num_layers
        hidden, _ = model.forward(params, token_ids, positions, is_token, caches, causal_attention, backend)
        return hidden, model.logits(params, hidden)

    return jax.jit(run)


def forward(model, params, prompt, backend, garbage=7):
    """Hidden states and logits of one prompt; the rows after it hold a token that is not part of it."""
    token_ids = np.full(ROWS, garbage, np.int32)
    token_ids[: len(prompt)] = prompt
    hidden, logits = compiled(model, backend)(params, token_ids, len(prompt))
    return hidden[: len(prompt)], logits[: len(prompt)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits_equal_transformers(checkpoint, prompt, backend):
    model, params, golden = checkpoint
    _, logits = forward(model, params, golden[f"prompt_{prompt}"], BACKENDS[backend])
    np.testing.assert_allclose(logits, golden[f"logits_{prompt}"], atol=LOGIT_TOLERANCE, rtol=0)


def test_last_hidden_state_equals_transformers(checkpoint):
    model, params, golden = checkpoint
    hidden, _ = forward(model, params, golden["prompt_0"], BACKENDS["dense"])
    np.testing.assert_allclose(hidden, golden["hidden_0"][-1], atol=LOGIT_TOLERANCE, rtol=0)


def test_routing_equals_transformers(checkpoint):
    model, params, golden = checkpoint
    seen = []

    def spy(x, routing, weights):
        jax.debug.callback(
            lambda ids, share: seen.append((ids, share)), routing.expert_ids, routing.weights, ordered=True
        )
        return BACKENDS["dense"](x, routing, weights)

    hidden, _ = forward(model, params, golden["prompt_0"], spy)
    hidden.block_until_ready()
    jax.effects_barrier()
    assert len(seen) == len(golden["router_ids_0"])
    for (ids, weights), golden_ids, golden_weights in zip(
        seen, golden["router_ids_0"], golden["router_weights_0"], strict=True
    ):
        num_tokens = len(golden_ids)
        np.testing.assert_array_equal(ids[:num_tokens], golden_ids)
        np.testing.assert_allclose(weights[:num_tokens], golden_weights, atol=1e-5)
        assert (ids[num_tokens:] == -1).all()
        assert (weights[num_tokens:] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_change_no_real_token(checkpoint, backend):
    model, params, golden = checkpoint
    one, other = (forward(model, params, golden["prompt_0"], BACKENDS[backend], garbage)[1] for garbage in (7, 300))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(one, golden["logits_0"], atol=LOGIT_TOLERANCE, rtol=0)


def test_both_config_dialects_give_the_same_model(checkpoint):
    for name in MODELS:
        assert build_model(read_config(FIXTURES / name)) == build_model(read_config(FIXTURES / name / "v5_style"))


def test_specs_describe_arrays_shardings_and_bytes(checkpoint):
    model, params, _ = checkpoint
    specs = model.param_specs(jnp.float32)
    leaves = jax.tree.leaves(params)
    assert num_params(specs) == sum(leaf.size for leaf in leaves)
    assert num_bytes(specs) == sum(leaf.nbytes for leaf in leaves)
    mesh = make_mesh(jax.devices()[:2])
    shapes = jax.tree.leaves(abstract(specs, mesh, DEFAULT_RULES))
    placed = jax.tree.leaves(random_init(specs, mesh, DEFAULT_RULES))
    for shape, array, spec in zip(shapes, placed, jax.tree.leaves(specs), strict=True):
        assert array.shape == shape.shape == spec.shape
        assert array.sharding == shape.sharding
        share = 2 if any(DEFAULT_RULES.get(axis) for axis in spec.axes if axis) else 1
        assert array.addressable_shards[0].data.size * share == array.size


def test_random_init_depends_on_seed_and_path_only(checkpoint):
    model, _, _ = checkpoint
    specs, mesh = model.param_specs(jnp.float32), make_mesh(jax.devices()[:1])
    first, again, other = (random_init(specs, mesh, DEFAULT_RULES, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["embedding"], again["embedding"])
    assert not np.array_equal(first["embedding"], other["embedding"])
    experts = first["layers"][0]["experts"]
    assert not np.array_equal(experts["gate_up"][0], experts["gate_up"][1])
