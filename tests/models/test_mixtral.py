"""What only Mixtral has: a second layout of the weights, a window that must not bite. The rest is in test_parity.py."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

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
from tpu_serve.models.mixtral import Mixtral

FOLDER = FIXTURES / "mixtral"


def model(**overrides: Any) -> Mixtral:
    return Mixtral.from_config(read_config(FOLDER, overrides))


def load(folder: Path) -> Any:
    return load_params(model().param_specs(jnp.float32), folder, make_mesh(jax.devices()[:1]), DEFAULT_RULES)


def test_fused_experts_are_the_same_weights(tmp_path):
    """Names and shapes as a transformers 5 model holds them."""
    files = SafetensorsFolder(FOLDER)
    tensors = {name: files.read(name).astype(np.float32) for name in files.names}
    moe = model().moe
    for layer in range(model().num_layers):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        tensors[f"{new}.gate.weight"] = tensors.pop(f"{old}.gate.weight")
        w1, w3, w2 = (
            np.stack([tensors.pop(f"{old}.experts.{expert}.{name}.weight") for expert in range(moe.num_experts)])
            for name in ("w1", "w3", "w2")
        )
        tensors[f"{new}.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        tensors[f"{new}.experts.down_proj"] = w2
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(FOLDER / "config.json", tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path), load(FOLDER))


def test_both_dialects_describe_the_same_model():
    names = json.loads((FOLDER / "v5_style" / "config.json").read_text())
    assert "rope_parameters" in names
    assert names["head_dim"] is None
    assert Mixtral.from_config(read_config(FOLDER / "v5_style")) == model()


def test_head_dim_follows_from_the_hidden_size_unless_given():
    assert (model().head_dim, model(head_dim=24).head_dim) == (16, 24)
    assert model(head_dim=24).param_specs(jnp.float32)["layers"][0]["attention"]["q_proj"].shape == (64, 96)


def test_weights_of_experts_always_sum_to_one():
    assert model().moe.renormalise
    assert model(norm_topk_prob=False).moe.renormalise


def test_tied_models_have_no_output_table():
    tied = model(tie_word_embeddings=True)
    assert "lm_head" not in tied.param_specs(jnp.float32)
    assert tied.ignored_weights == ("lm_head.weight",)


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_windows_that_hide_nothing(window):
    assert model(sliding_window=window) == model()


def test_a_window_is_that_of_every_layer():
    narrow = model(sliding_window=511)
    assert narrow.window == 511
    assert [layer.window for layer in narrow.cache_layout(jnp.float32).layers] == [511] * narrow.num_layers


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for mixtral"),
        ({"num_experts": None}, "num_experts is null, but this model needs it"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' is not supported"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
