"""What Qwen3-Next reads from config.json and from files where the goldens have only one form."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from golden_models import backend_for, forward
from published_configs import PUBLISHED
from safetensors.numpy import save_file

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import PagedCache, StateCache
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import random_init
from tpu_serve.engine.placement import Placement
from tpu_serve.hf_config import HFConfig, read_config
from tpu_serve.models.qwen3_next import FULL, LINEAR, Qwen3Next

FOLDER = FIXTURES / "qwen3_next"
LINEAR_LAYERS = (0, 2)


def model(**overrides):
    return Qwen3Next.from_config(read_config(FOLDER, overrides))


def load(folder):
    return load_params(model().param_specs(jnp.float32), folder, make_mesh(jax.devices()[:1]), DEFAULT_RULES)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (LINEAR, FULL, LINEAR, FULL)),
        ({"full_attention_interval": None}, (LINEAR, LINEAR, LINEAR, FULL)),
        ({"full_attention_interval": 1}, (FULL, FULL, FULL, FULL)),
        ({"num_hidden_layers": 5, "full_attention_interval": 3}, (LINEAR, LINEAR, FULL, LINEAR, LINEAR)),
        ({"layer_types": [FULL, LINEAR, LINEAR, LINEAR]}, (FULL, LINEAR, LINEAR, LINEAR)),
    ],
)
def test_which_layers_are_recurrent(overrides, expected):
    found = model(**overrides)
    assert found.kinds == expected
    caches, layers = found.cache_layout(jnp.float32).layers, found.param_specs(jnp.float32)["layers"]
    for kind, cache, layer in zip(expected, caches, layers, strict=True):
        assert isinstance(cache, StateCache if kind == LINEAR else PagedCache)
        assert ("delta_net" in layer, "attention" in layer) == (kind == LINEAR, kind == FULL)


def test_sizes_that_are_absent_are_those_of_transformers():
    needed = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts",
              "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings")  # fmt: skip
    published = PUBLISHED["Qwen3-Next-80B-A3B"].config
    given = Qwen3Next.from_config(HFConfig(FOLDER, published | {"rope_theta": 1e4}))
    assert Qwen3Next.from_config(HFConfig(FOLDER, {name: published[name] for name in needed})) == given


def test_published_sizes():
    found = Qwen3Next.from_config(HFConfig(FOLDER, PUBLISHED["Qwen3-Next-80B-A3B"].config))
    assert [layer for layer, kind in enumerate(found.kinds) if kind == FULL] == list(range(3, 48, 4))
    assert len(found.rope.inverse_frequencies) == 32
    layers = found.param_specs(jnp.bfloat16)["layers"]
    shapes = {name: spec.shape for name, spec in layers[0]["delta_net"].items()}
    assert shapes == {
        "q_proj": (2048, 2048), "k_proj": (2048, 2048), "v_proj": (2048, 4096), "z_proj": (2048, 4096),
        "b_proj": (2048, 32), "a_proj": (2048, 32), "q_conv": (16, 128, 4), "k_conv": (16, 128, 4),
        "v_conv": (32, 128, 4), "decay_log": (32,), "decay_bias": (32,), "norm": (128,), "out_proj": (4096, 2048),
    }  # fmt: skip
    stored = {source.keys[0]: source.shape for spec in layers[0]["delta_net"].values() for source in spec.sources[:1]}
    assert stored["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (12288, 2048)
    assert stored["model.layers.0.linear_attn.in_proj_ba.weight"] == (64, 2048)
    assert stored["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert layers[3]["attention"]["q_proj"].shape == (2048, 8192)
    assert layers[3]["attention"]["o_proj"].shape == (4096, 2048)
    # 36 layers: a float32 matrix of 128 by 128 for each of 32 heads, three inputs of 8192 channels.
    assert found.cache_layout(jnp.bfloat16).state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


@pytest.mark.parametrize(("given", "expected"), [(True, True), (False, False), (None, True)])
def test_weights_of_experts_are_renormalised_unless_told(given, expected):
    assert model(norm_topk_prob=given).moe.renormalise is expected


def test_numbers_of_the_decay_and_the_gated_norm_are_float32():
    specs = model().param_specs(jnp.bfloat16)["layers"][0]["delta_net"]
    wide = {name for name, spec in specs.items() if spec.dtype == jnp.float32}
    assert wide == {"decay_log", "decay_bias", "norm"}


def test_tied_models_have_no_output_table():
    tied = model(tie_word_embeddings=True)
    assert "lm_head" not in tied.param_specs(jnp.float32)
    assert tied.ignored_weights == ("mtp.*", "lm_head.weight")


def plain_projections(prefix, tensors):
    """Replaces projections whose rows are grouped by key head by those that do not mix heads."""
    qkvz, ba = (tensors.pop(f"{prefix}.in_proj_{name}.weight") for name in ("qkvz", "ba"))
    q, k, v, z, b, a = ([] for _ in range(6))
    for head in range(2):  # of 16 queries, 16 keys, and two value heads of 16 values and 16 gates each
        rows = qkvz[96 * head : 96 * (head + 1)]
        q += [*rows[:16]]
        k += [*rows[16:32]]
        v += [*rows[32:64]]
        z += [*rows[64:]]
        b += [*ba[4 * head : 4 * head + 2]]
        a += [*ba[4 * head + 2 : 4 * head + 4]]
    for name, rows in {"qkv": q + k + v, "z": z, "b": b, "a": a}.items():
        tensors[f"{prefix}.in_proj_{name}.weight"] = np.stack(rows)


def test_both_orders_of_projections_are_the_same_weights(tmp_path):
    files = SafetensorsFolder(FOLDER)
    tensors = {name: files.read(name).astype(np.float32) for name in files.names}
    for layer in LINEAR_LAYERS:
        plain_projections(f"model.layers.{layer}.linear_attn", tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), load(FOLDER))


@pytest.mark.parametrize(("num_devices", "num_key_heads"), [(2, 2), (4, 4), (8, None)])
def test_key_heads_lie_with_the_value_heads_that_read_them(num_devices, num_key_heads):
    """Two key heads and four value heads: none of them is ever parted, though the sizes of the weights would allow it."""
    specs, layout = model().param_specs(jnp.float32), model().cache_layout(jnp.float32)
    placement = Placement.over(jax.devices()[:num_devices], specs, layout)
    assert ("linear_heads" in placement.rules) == ("linear_key_heads" in placement.rules) == (num_key_heads is not None)
    found, tails = placement.specs["layers"][0]["delta_net"], dict(placement.cache_layout.layers[0].arrays)
    assert found["k_proj"].shape[1] == (num_key_heads or 2) * 16
    assert tails["k_tail"].shape == (3 * found["k_proj"].shape[1],)
    assert found["v_proj"] == specs["layers"][0]["delta_net"]["v_proj"]


def test_random_weights_of_experts_and_of_a_dense_layer():
    mixed = model(mlp_only_layers=[1], num_hidden_layers=2)
    assert mixed.moe_layers == (True, False)
    params = random_init(mixed.param_specs(jnp.float32), make_mesh(jax.devices()[:1]), DEFAULT_RULES)
    assert ("mlp" in params["layers"][0], "mlp" in params["layers"][1]) == (False, True)
    assert params["layers"][1]["mlp"]["gate_proj"].shape == (64, 96)
    _, logits = forward(mixed, params, np.arange(40), backend_for(mixed, "dense"))
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not supported for qwen3_next"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported for qwen3_next"),
        ({"attn_output_gate": False}, "attn_output_gate must be true for qwen3_next"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3_next"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"layer_types": [LINEAR, FULL]}, "layer_types names 2 layers, but num_hidden_layers is 4"),
        ({"layer_types": [LINEAR, "sliding_attention"] * 2}, "'sliding_attention' in layer_types is not supported"),
        ({"layer_types": [LINEAR] * 4}, "layer_types must have at least one 'full_attention'"),
        ({"num_experts": None}, "num_experts is null, but this model needs it"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is null, but this model needs it"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
