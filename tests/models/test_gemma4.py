"""What the golden config of Gemma 4 has only one value of, its other dialects and layouts, and what its class has and is refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from golden_models import backend_for, forward, load_fixture
from safetensors.numpy import save_file

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import iterate, random_init
from tpu_serve.hf_config import HFConfig, read_config
from tpu_serve.layers.gemma import scaled_embedding
from tpu_serve.models.gemma4 import Gemma4
from tpu_serve.models.registry import build_model

FOLDER = FIXTURES / "gemma4"
OUTER, INNER = "model.language_model.", "model."


def model(**overrides):
    return build_model(read_config(FOLDER, overrides))


def without(*names):
    values = dict(read_config(FOLDER).values)
    for name in names:
        del values[name]
    return Gemma4.from_config(HFConfig(FOLDER, values))


def load(folder):
    gemma, mesh = model(), make_mesh(jax.devices()[:1])
    return load_params(gemma.param_specs(jnp.float32), folder, mesh, DEFAULT_RULES, ignore=gemma.ignored_weights)


def rewritten(folder, change):
    """A checkpoint of the tensors that `change` makes of those of the fixture."""
    files = SafetensorsFolder(FOLDER)
    tensors = change({name: files.read(name).astype(np.float32) for name in files.names})
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def text_only(tensors):
    return {name.replace(OUTER, INNER): array for name, array in tensors.items() if name.startswith(OUTER)}


def test_kinds_of_layers():
    local, whole = PagedCache(2, 16, 16), PagedCache(1, 32)
    assert model().cache_layout(jnp.float32).layers == (local, local, whole, local, whole)
    assert [heads.keys_are_values for heads in model().layers] == [False, False, True, False, True]
    assert ["v_proj" in layer["attention"] for layer in model().param_specs(jnp.float32)["layers"]] == [
        True,
        True,
        False,
        True,
        False,
    ]


def test_last_layer_is_global_whatever_the_config_says():
    types = ["full_attention", *["sliding_attention"] * 4]
    assert [heads.window for heads in model(layer_types=types).layers] == [None, 16, 16, 16, None]


def test_every_sixth_layer_is_global_unless_listed():
    seven = model(layer_types=None, num_hidden_layers=7)
    assert [heads.window for heads in seven.layers] == [16, 16, 16, 16, 16, None, None]


def test_keys_are_values_only_when_asked():
    separate = without("attention_k_eq_v")
    assert not any(heads.keys_are_values for heads in separate.layers)
    assert {heads.num_kv_heads for heads in separate.layers} == {2}  # the number for global layers counts with it only
    assert separate.layers[-1].head_dim == 32
    layers = separate.param_specs(jnp.float32)["layers"]
    assert [layer["attention"]["v_proj"].shape[1] for layer in layers] == [32, 32, 64, 32, 64]


def test_rotation_of_global_layers_leaves_most_pairs():
    whole, local = model().layers[2].rope.inverse_frequencies, model().layers[0].rope.inverse_frequencies
    np.testing.assert_allclose(whole, [1e6 ** (-2 * i / 32) if i < 4 else 0 for i in range(16)])
    np.testing.assert_allclose(local, [1e4 ** (-2 * i / 16) for i in range(8)])
    assert without("rope_parameters") == model()


def test_class_defaults():
    lean = without(
        "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window",
        "rms_norm_eps", "max_position_embeddings", "final_logit_softcapping", "num_global_key_value_heads",
    )  # fmt: skip
    assert (lean.vocab_size, lean.num_heads, lean.epsilon, lean.max_position, lean.cap) == (
        262144,
        8,
        1e-6,
        131072,
        None,
    )
    assert lean.cache_layout(jnp.float32).layers[1:3] == (PagedCache(4, 256, 512), PagedCache(4, 512))
    assert model().moe.renormalise
    assert without("enable_moe_block").moe is None


def test_other_sizes_by_number_of_layer():
    written = json.loads((FOLDER / "v5_style" / "config.json").read_text())["text_config"]
    assert "global_head_dim" not in written
    assert set(written["per_layer_config"]) == {"2", "4"}
    sizes = {"00002": {"head_dim": 64, "num_key_value_heads": 4}, "4": {"head_dim": 8}}
    layers = model(per_layer_config=sizes, global_head_dim=128).layers
    assert [(heads.num_kv_heads, heads.head_dim) for heads in layers] == [(2, 16), (2, 16), (4, 64), (2, 16), (2, 8)]


def test_text_model_alone_is_the_same(tmp_path):
    text = json.loads((FOLDER / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert text["model_type"] == "gemma4_text"
    assert build_model(read_config(tmp_path)) == model()
    jax.tree.map(np.testing.assert_array_equal, load(rewritten(tmp_path, text_only)), load(FOLDER))


def test_tensors_of_images_and_sound_are_skipped_and_no_others(tmp_path):
    more = {
        f"model.{name}": np.zeros(2, np.float32)
        for name in (
            "vision_tower.std_bias", "embed_vision.embedding_projection.weight", "audio_tower.layers.0.norm.weight",
            "embed_audio.embedding_projection.weight",
        )
    }  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, load(rewritten(tmp_path, lambda own: own | more)), load(FOLDER))
    unknown = {"model.language_model.embed_tokens_per_layer.weight": np.zeros(2, np.float32)}
    with pytest.raises(ConfigError, match="does not know"):
        load(rewritten(tmp_path, lambda own: own | unknown))


def test_experts_one_by_one_are_the_same_weights(tmp_path):
    def split(tensors):
        gate_ups = [name for name in tensors if name.endswith("experts.gate_up_proj")]
        assert len(gate_ups) == len(model().layers)
        for name in gate_ups:
            prefix = name.removesuffix(".gate_up_proj")
            gate_up, down = tensors.pop(name), tensors.pop(f"{prefix}.down_proj")
            for expert, (both, back) in enumerate(zip(gate_up, down, strict=True)):
                gate, up = np.split(both, 2)
                projections = {"gate_proj": gate, "up_proj": up, "down_proj": back}
                tensors |= {f"{prefix}.{expert}.{key}.weight": array for key, array in projections.items()}
        return tensors

    jax.tree.map(np.testing.assert_array_equal, load(rewritten(tmp_path, split)), load(FOLDER))


def test_embedding_is_scaled_by_a_rounded_root():
    table = jax.random.normal(jax.random.key(0), (4, 2816), jnp.bfloat16)
    scaled = scaled_embedding(table, jnp.array([1, 3]))
    rows = table[jnp.array([1, 3])].astype(jnp.float32)
    np.testing.assert_array_equal(scaled, (rows * 53.0).astype(jnp.bfloat16))
    assert not np.array_equal(scaled, (rows * 2816**0.5).astype(jnp.bfloat16))
    np.testing.assert_allclose(scaled_embedding(rows, jnp.array([0]))[0], rows[0] * 2816**0.5, rtol=1e-6)


def test_dense_member_is_the_mixture_without_experts():
    """A norm without weights after the MLP changes nothing before another norm, if nothing is added between them."""
    gemma, params, golden = load_fixture("gemma4")
    gemma = dataclasses.replace(gemma, epsilon=1e-12)
    for layer in params["layers"]:
        layer["post_experts_norm"] = jnp.zeros_like(layer["post_experts_norm"])
        layer["post_mlp_norm"] = jnp.ones_like(layer["post_mlp_norm"])
    _, expected = forward(gemma, params, golden["prompt_1"], backend_for(gemma, "dense"))
    dense = dataclasses.replace(gemma, moe=None)
    _, logits = forward(dense, params, golden["prompt_1"], None)
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    names = {path for path, _ in iterate(dense.param_specs(jnp.float32))}
    assert names == {
        path
        for path, _ in iterate(gemma.param_specs(jnp.float32))
        if not re.search(r"router|expert|post_mlp_norm", path)
    }


def test_random_weights_give_sane_logits():
    gemma = model()
    params = random_init(gemma.param_specs(jnp.bfloat16), make_mesh(jax.devices()[:1]), DEFAULT_RULES)
    hidden, logits = forward(gemma, params, np.arange(20), backend_for(gemma, "ragged blocks"))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert np.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 10


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 is not supported for gemma4"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 is not supported for gemma4; supported is 0"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp true is not supported for gemma4; supported is false"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported for gemma4"),
        ({"hidden_activation": "silu"}, 'hidden_activation "silu" is not supported for gemma4; supported is "gelu_pyt'),
        ({"layer_types": ["chunked_attention"] * 5}, "'chunked_attention' in layer_types is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, but num_hidden_layers is 5"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config sliding_window 4 is not supported"),
        ({"per_layer_config": {"5": {"head_dim": 4}}}, "per_layer_config entry '5' is no object for one of 5 layers"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be positive or null, got 0"),
        ({"num_experts": None}, "num_experts is null, but this model needs it"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)


def test_refuses_embeddings_of_each_layer_where_the_config_is_silent():
    with pytest.raises(ConfigError, match="left out, it means 256"):
        without("hidden_size_per_layer_input")
    assert model(hidden_size_per_layer_input=None) == model()
