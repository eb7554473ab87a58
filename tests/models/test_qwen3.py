"""What the dense Qwen3 reads from config.json where the goldens' config has only one value."""

import re

import jax.numpy as jnp
import pytest
from cases import FIXTURES

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import read_config
from tpu_serve.models.qwen3 import Qwen3


def model(**overrides):
    return Qwen3.from_config(read_config(FIXTURES / "qwen3", overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (None, None, None)),
        ({"sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
        ({"sliding_window": None, "max_window_layers": 0, "use_sliding_window": True}, (None, None, None)),
        ({"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (None, 8, 8)),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            (8, None, None),
        ),
    ],
)
def test_which_layers_have_a_window(overrides, expected):
    found = model(**overrides)
    assert found.windows == expected
    assert tuple(layer.window for layer in found.cache_layout(jnp.float32).layers) == expected


def test_projections_have_biases_only_when_told():
    layers = [model(attention_bias=given).param_specs(jnp.float32)["layers"][0] for given in (False, True)]
    assert set(layers[1]["attention"]) - set(layers[0]["attention"]) == {f"{letter}_proj_bias" for letter in "qkvo"}


def test_a_head_has_128_values_unless_told():
    assert (model().head_dim, model(head_dim=None).head_dim) == (16, 128)


def test_no_layer_holds_experts():
    assert model().moe is None


def test_the_output_table_is_the_embedding_only_where_tied():
    assert model().ignored_weights == ("lm_head.weight",)
    untied = model(tie_word_embeddings=False)
    assert "lm_head" in untied.param_specs(jnp.float32)
    assert untied.ignored_weights == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' in layer_types is not supported"),
        ({"intermediate_size": None}, "intermediate_size is null, but this model needs it"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
