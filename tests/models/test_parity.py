"""Every model family against goldens made with transformers: logits, hidden states, routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES, LOGIT_TOLERANCE, MODELS
from golden_models import BACKENDS, backend_for, forward, load_fixture

from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import abstract, num_bytes, num_params, random_init
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model

PAIRS = [
    (model, backend)
    for model in MODELS
    # A backend does not know the family: one for each activation is enough where all would be the same work.
    for backend in (BACKENDS if model in ("qwen3_moe", "gpt_oss", "gemma4") else ("ragged blocks",))
]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request):
    return load_fixture(request.param)


@pytest.mark.parametrize(("checkpoint", "backend"), PAIRS, indirect=["checkpoint"])
@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_logits_equal_transformers(checkpoint, prompt, backend):
    model, params, golden = checkpoint
    _, logits = forward(model, params, golden[f"prompt_{prompt}"], backend_for(model, backend))
    np.testing.assert_allclose(logits, golden[f"logits_{prompt}"], atol=LOGIT_TOLERANCE, rtol=0)


def test_bfloat16_is_near(checkpoint):
    """On average and in the tokens that it prefers; a router that decides otherwise may move single logits far."""
    model, params, golden = checkpoint
    narrow = jax.tree.map(lambda x, s: x.astype(s.dtype), params, model.param_specs(jnp.bfloat16))
    differences, agreements = [], []
    for prompt in (1, 2):
        _, logits = forward(model, narrow, golden[f"prompt_{prompt}"], backend_for(model, "ragged blocks"))
        assert logits.dtype == jnp.float32
        differences.append(np.abs(logits - golden[f"logits_{prompt}"]).mean())
        agreements += (np.argmax(logits, -1) == golden[f"logits_{prompt}"].argmax(-1)).tolist()
    assert 0.005 < np.mean(differences) < 0.4
    assert np.mean(agreements) > 0.75


def test_last_hidden_state_equals_transformers(checkpoint):
    model, params, golden = checkpoint
    hidden, _ = forward(model, params, golden["prompt_0"], backend_for(model, "ragged blocks"))
    np.testing.assert_allclose(hidden, golden["hidden_0"][-1], atol=LOGIT_TOLERANCE, rtol=0)


def test_routing_equals_transformers(checkpoint):
    model, params, golden = checkpoint
    seen = []

    def spy(x, routing, weights):
        jax.debug.callback(
            lambda ids, share: seen.append((ids, share)), routing.expert_ids, routing.weights, ordered=True
        )
        return backend_for(model, "ragged blocks")(x, routing, weights)

    hidden, _ = forward(model, params, golden["prompt_0"], spy)
    hidden.block_until_ready()
    jax.effects_barrier()
    golden_ids_of, golden_weights_of = (golden[f"router_{name}_0"] if model.moe else () for name in ("ids", "weights"))
    assert len(seen) == len(golden_ids_of)
    for (ids, weights), golden_ids, golden_weights in zip(seen, golden_ids_of, golden_weights_of, strict=True):
        num_tokens = len(golden_ids)
        np.testing.assert_array_equal(ids[:num_tokens], golden_ids)
        np.testing.assert_allclose(weights[:num_tokens], golden_weights, atol=1e-5)
        assert (ids[num_tokens:] == -1).all()
        assert (weights[num_tokens:] == 0).all()


@pytest.mark.parametrize(("checkpoint", "backend"), PAIRS, indirect=["checkpoint"])
def test_padding_rows_change_no_real_token(checkpoint, backend):
    model, params, golden = checkpoint
    one, other = (
        forward(model, params, golden["prompt_0"], backend_for(model, backend), garbage)[1] for garbage in (7, 300)
    )
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
    if model.moe is not None:
        experts = next(layer["experts"] for layer in first["layers"] if "experts" in layer)
        assert not np.array_equal(experts["gate_up"][0], experts["gate_up"][1])
