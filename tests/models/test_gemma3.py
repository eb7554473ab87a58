"""What the golden config of Gemma 3 has only one value of, and where multimodal files keep the text model."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from golden_models import forward
from safetensors.numpy import save_file

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import random_init
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model

FOLDER = FIXTURES / "gemma3"


def model(**overrides):
    return build_model(read_config(FOLDER, overrides))


def of_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return build_model(read_config(folder))


def load(gemma, folder):
    mesh = make_mesh(jax.devices()[:1])
    return load_params(gemma.param_specs(jnp.float32), folder, mesh, DEFAULT_RULES, ignore=gemma.ignored_weights)


def test_kinds_of_layers():
    local, whole = PagedCache(2, 16, 16), PagedCache(2, 16)
    assert model().cache_layout(jnp.float32).layers == (local, local, whole, local)
    listed = model(layer_types=["full_attention", *["sliding_attention"] * 3])
    assert listed.cache_layout(jnp.float32).layers == (whole, local, local, local)
    every_sixth = model(sliding_window_pattern=None, num_hidden_layers=12)
    assert [kind[:4] for kind in every_sixth.layer_types] == [*["slid"] * 5, "full"] * 2


def test_a_lean_multimodal_config_means_the_defaults_of_the_class(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    lean = of_config(tmp_path, model_type="gemma3", text_config=text, vision_config={"hidden_size": 32})
    assert (lean.vocab_size, lean.num_heads, lean.max_position, lean.tied) == (262208, 8, 131072, True)
    assert lean.cache_layout(jnp.float32).layers == (*[PagedCache(4, 256, 4096)] * 5, PagedCache(4, 256))
    assert (lean.score_scale, lean.cap, lean.epsilon) == (1 / 16, None, 1e-6)
    for rope, theta in zip(lean.ropes, (1e6, 1e4), strict=True):
        np.testing.assert_allclose(rope.inverse_frequencies, theta ** (-np.arange(0, 256, 2) / 256))


def test_scaling_slows_full_layers_only():
    plain, scaled = model().ropes, model(rope_scaling={"factor": 8.0, "rope_type": "linear"}).ropes
    np.testing.assert_allclose(scaled[0].inverse_frequencies, np.array(plain[0].inverse_frequencies) / 8)
    assert scaled[1] == plain[1] != plain[0]
    new = {
        "full_attention": {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 100, "rope_type": "default"},
    }
    assert model(rope_parameters=new).ropes == scaled


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_files_hold_the_same_weights(tmp_path, prefix):
    files = SafetensorsFolder(FOLDER)
    tensors = {prefix + name.removeprefix("model."): files.read(name).astype(np.float32) for name in files.names}
    beside = prefix.removesuffix("language_model.") if prefix.startswith("model.") else ""
    for name in ("vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_soft_emb_norm.weight"):
        tensors[beside + name] = np.zeros(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((FOLDER / "config.json").read_text())
    nested = of_config(tmp_path, model_type="gemma3", text_config=text, vision_config={"hidden_size": 32})
    assert nested == model()
    jax.tree.map(np.testing.assert_array_equal, load(nested, tmp_path), load(model(), FOLDER))


def test_untied_models_have_an_output_table():
    untied = model(tie_word_embeddings=False)
    assert untied.param_specs(jnp.float32)["lm_head"].shape == (512, 64)
    assert "lm_head.weight" not in untied.ignored_weights
    assert "lm_head" not in model().param_specs(jnp.float32)


def test_random_weights_give_sane_logits():
    params = random_init(model().param_specs(jnp.bfloat16), make_mesh(jax.devices()[:1]), DEFAULT_RULES)
    hidden, logits = forward(model(), params, np.arange(20), None)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert np.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 20


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_bias": True}, "attention_bias true is not supported for gemma3_text; supported is false"),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 is not supported for gemma3_text; supported is null",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        ({"hidden_activation": "gelu"}, 'hidden_activation "gelu" is not supported'),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention' in layer_types is not supported"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping must be positive or null, got -1"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' is not supported"),
        ({"hidden_size": None}, "hidden_size is null, but this model needs it"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
