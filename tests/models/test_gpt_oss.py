"""What GPT-OSS reads from config.json and from files where the goldens have only one form."""

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
from tpu_serve.models.gpt_oss import GptOss

FOLDER = FIXTURES / "gpt_oss"


def model(**overrides):
    return GptOss.from_config(read_config(FOLDER, overrides))


def load(folder):
    return load_params(model().param_specs(jnp.float32), folder, make_mesh(jax.devices()[:1]), DEFAULT_RULES)


def stored():
    files = SafetensorsFolder(FOLDER)
    return {name: files.read(name).astype(np.float32) for name in files.names}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"layer_types": None}, (16, None, 16, None)),
        ({"layer_types": None, "sliding_window": 128}, (128, None, 128, None)),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None, None, None, 16)),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": None}, (None,) * 4),
    ],
)
def test_which_layers_have_a_window(overrides, expected):
    found = model(**overrides)
    assert found.windows == expected
    assert tuple(layer.window for layer in found.cache_layout(jnp.float32).layers) == expected


def test_what_config_json_need_not_say():
    assert model(swiglu_limit=None).moe.activation.limit == 7.0
    assert (model().moe.activation.limit, model().moe.activation.alpha) == (1.5, 1.702)
    assert model(swiglu_alpha=1.5).moe.activation.alpha == 1.5
    assert (model(head_dim=None).head_dim, model(rms_norm_eps=None).epsilon) == (64, 1e-5)


def test_plain_positions_must_be_asked_for():
    assert model(rope_scaling={"rope_type": "default"}).rope.magnitude == 1.0
    values = {name: value for name, value in read_config(FOLDER).values.items() if name != "rope_scaling"}
    config = type(read_config(FOLDER))(FOLDER, values)
    with pytest.raises(ConfigError, match="gpt_oss needs rope_scaling"):
        GptOss.from_config(config)


def test_attention_without_biases():
    attention = model(attention_bias=False).param_specs(jnp.float32)["layers"][0]["attention"]
    assert sorted(attention) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_tied_models_have_no_output_table():
    tied = model(tie_word_embeddings=True)
    assert "lm_head" not in tied.param_specs(jnp.float32)
    assert tied.ignored_weights == ("lm_head.weight",)


def test_even_columns_are_gates_and_odd_ones_ups():
    tensors, experts = stored(), load(FOLDER)["layers"][1]["experts"]
    both, bias = (tensors[f"model.layers.1.mlp.experts.gate_up_proj{end}"] for end in ("", "_bias"))
    for half in range(2):
        np.testing.assert_array_equal(experts["gate_up"][:, half], both[:, :, half::2])
        np.testing.assert_array_equal(experts["gate_up_bias"][:, half, 0], bias[:, half::2])
    np.testing.assert_array_equal(experts["down"], tensors["model.layers.1.mlp.experts.down_proj"])


def test_biases_of_experts_stay_in_float32():
    experts = model().param_specs(jnp.bfloat16)["layers"][0]["experts"]
    assert {name: spec.dtype for name, spec in experts.items()} == {
        "gate_up": jnp.bfloat16,
        "down": jnp.bfloat16,
        "gate_up_bias": jnp.float32,
        "down_bias": jnp.float32,
    }


def test_tensors_of_each_expert_are_the_same_weights(tmp_path):
    tensors = stored()
    for layer in range(len(model().windows)):
        prefix = f"model.layers.{layer}.mlp.experts"
        both, down = tensors.pop(f"{prefix}.gate_up_proj"), tensors.pop(f"{prefix}.down_proj")
        both_bias, down_bias = tensors.pop(f"{prefix}.gate_up_proj_bias"), tensors.pop(f"{prefix}.down_proj_bias")
        for expert in range(len(both)):
            for half, name in enumerate(("gate_proj", "up_proj")):
                tensors[f"{prefix}.{expert}.{name}.weight"] = np.ascontiguousarray(both[expert, :, half::2].T)
                tensors[f"{prefix}.{expert}.{name}.bias"] = np.ascontiguousarray(both_bias[expert, half::2])
            tensors[f"{prefix}.{expert}.down_proj.weight"] = np.ascontiguousarray(down[expert].T)
            tensors[f"{prefix}.{expert}.down_proj.bias"] = down_bias[expert]
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), load(FOLDER))


def test_fused_tensors_have_one_orientation_even_where_sizes_allow_both():
    square = model(intermediate_size=64).param_specs(jnp.float32)["layers"][0]["experts"]
    for weight, name in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        keys = [source.keys for source in square[weight].sources]
        assert keys[0] == (f"model.layers.0.mlp.experts.{name}",)
        assert keys.count(keys[0]) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for gpt_oss"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 4"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' in layer_types is not supported"),
        ({"sliding_window": None}, "sliding_window is null, but this model needs it"),
        ({"num_experts": None}, "num_experts is null, but this model needs it"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' is not supported"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
