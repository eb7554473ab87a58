"""What Qwen3.5-MoE reads from config.json and from files where the goldens have only one form."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from published_configs import PUBLISHED
from safetensors.numpy import save_file

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.hf_config import HFConfig, read_config
from tpu_serve.models.qwen3_5_moe import Qwen35Moe
from tpu_serve.models.registry import build_model

FOLDER = FIXTURES / "qwen3_5_moe"


def model(**overrides):
    return Qwen35Moe.from_config(read_config(FOLDER, overrides))


def load(folder):
    specs, ignored = model().param_specs(jnp.float32), model().ignored_weights
    return load_params(specs, folder, make_mesh(jax.devices()[:1]), DEFAULT_RULES, ignore=ignored)


def read_tensors():
    files = SafetensorsFolder(FOLDER)
    return {name: files.read(name).astype(np.float32) for name in files.names}


def test_interval_where_no_layer_types_are_given():
    found = model(layer_types=None)
    assert found.kinds == model().kinds == ("linear_attention",) * 3 + ("full_attention",)
    assert model(layer_types=None, full_attention_interval=2).kinds == ("linear_attention", "full_attention") * 2


def test_experts_are_in_all_layers_and_their_weights_always_sum_to_one():
    found = model(norm_topk_prob=False, mlp_only_layers=[1], decoder_sparse_step=2)
    assert found.moe.renormalise
    assert found.moe_layers == (True,) * 4


def test_a_quarter_of_each_head_is_rotated_unless_told():
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_type": "default", "rope_theta": 10000}
    published = PUBLISHED["Qwen3.5-35B-A3B"].config
    assert len(Qwen35Moe.from_config(HFConfig(FOLDER, published)).rope.inverse_frequencies) == 32
    file = json.loads((FOLDER / "config.json").read_text())["text_config"]
    assert Qwen35Moe.from_config(HFConfig(FOLDER, file | {"rope_scaling": sections})).rope == model().rope


def test_a_text_model_alone_is_the_same_model(tmp_path):
    """Without the vision tower's config and weights, one level further up, and with a tensor for each expert's projections."""
    config = json.loads((FOLDER / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(text))
    tensors = {}
    for name, tensor in read_tensors().items():
        name = name.replace("model.language_model.", "model.")
        if name.startswith(("model.visual.", "mtp.")):
            continue
        prefix, last = name.rsplit(".", 1)
        if last == "gate_up_proj":
            for expert, (gate, up) in enumerate(tensor.reshape(8, 2, 24, 64)):
                tensors[f"{prefix}.{expert}.gate_proj.weight"] = gate.copy()
                tensors[f"{prefix}.{expert}.up_proj.weight"] = up.copy()
        elif last == "down_proj":
            tensors |= {f"{prefix}.{expert}.down_proj.weight": down.copy() for expert, down in enumerate(tensor)}
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    assert build_model(read_config(tmp_path)) == model()
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), load(FOLDER))


@pytest.mark.parametrize("name", ["model.language_model.layers.0.linear_attn.extra", "model.layers.1.mlp.gate.bias"])
def test_only_what_is_known_is_skipped(tmp_path, name):
    save_file(read_tensors() | {name: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape(name)):
        load(tmp_path)


def test_tied_models_have_no_output_table():
    tied = model(tie_word_embeddings=True)
    assert "lm_head" not in tied.param_specs(jnp.float32)
    assert tied.ignored_weights == ("model.visual.*", "mtp.*", "lm_head.weight")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate must be true for qwen3_5_moe"),
        ({"attention_bias": True}, "attention_bias is not supported for qwen3_5_moe"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3_5_moe"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts is impossible"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
