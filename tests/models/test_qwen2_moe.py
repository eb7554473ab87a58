"""What Qwen2-MoE reads from config.json and from files where the goldens have only one form."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from safetensors.numpy import save_file

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.hf_config import read_config
from tpu_serve.models.qwen2_moe import Qwen2Moe

FOLDER = FIXTURES / "qwen2_moe"


def model(**overrides):
    return Qwen2Moe.from_config(read_config(FOLDER, overrides))


def load(folder):
    return load_params(model().param_specs(jnp.float32), folder, make_mesh(jax.devices()[:1]), DEFAULT_RULES)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False)),
    ],
)
def test_which_layers_hold_experts(overrides, expected):
    found = model(**overrides)
    assert found.moe_layers == expected
    for has_experts, layer in zip(expected, found.param_specs(jnp.float32)["layers"], strict=True):
        assert all(
            (name in layer) == has_experts for name in ("router", "experts", "shared_expert", "shared_expert_gate")
        )
        if not has_experts:
            assert layer["mlp"]["gate_proj"].shape == (64, 96)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (None, None, None)),
        ({"use_sliding_window": True}, (16, None, None)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (16, None, 16)),
        ({"use_sliding_window": True, "max_window_layers": None, "sliding_window": 32}, (32, None, 32)),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (None, 16, None)),
    ],
)
def test_which_layers_have_a_window(overrides, expected):
    found = model(**overrides)
    assert found.windows == expected
    assert tuple(layer.window for layer in found.cache_layout(jnp.float32).layers) == expected


@pytest.mark.parametrize(("given", "expected"), [(True, True), (False, False), (None, False)])
def test_weights_of_experts_are_renormalised_only_when_asked(given, expected):
    assert model(norm_topk_prob=given).moe.renormalise is expected


@pytest.mark.parametrize(("given", "expected"), [(True, 3), (None, 3), (False, 0)])
def test_queries_keys_and_values_have_biases_unless_told(given, expected):
    attention = model(qkv_bias=given).param_specs(jnp.float32)["layers"][0]["attention"]
    assert sum(name.endswith("_bias") for name in attention) == expected
    assert "o_proj_bias" not in attention


def test_tied_models_have_no_output_table():
    tied = model(tie_word_embeddings=True)
    assert "lm_head" not in tied.param_specs(jnp.float32)
    assert tied.ignored_weights == ("lm_head.weight",)


def test_fused_experts_are_the_same_weights(tmp_path):
    files = SafetensorsFolder(FOLDER)
    tensors = {name: files.read(name).astype(np.float32) for name in files.names}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{prefix}.{expert}.{name}.weight") for expert in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{prefix}.down_proj"] = down
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), load(FOLDER))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen2_moe"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is null, but this model needs it"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' in layer_types is not supported"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is null"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is null, but this model needs it"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
