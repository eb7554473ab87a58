"""What Qwen3-MoE reads from config.json where the goldens' configs have only one value."""

import re

import pytest
from cases import FIXTURES

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import read_config
from tpu_serve.models.qwen3_moe import Qwen3Moe


def model(**overrides):
    return Qwen3Moe.from_config(read_config(FIXTURES / "qwen3_moe", overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False)),
        ({"decoder_sparse_step": 3}, (False, False, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False)),
    ],
)
def test_which_layers_hold_experts(overrides, expected):
    assert model(**overrides).moe_layers == expected


@pytest.mark.parametrize(("given", "expected"), [(True, True), (False, False), (None, False)])
def test_weights_of_experts_are_renormalised_only_when_asked(given, expected):
    assert model(norm_topk_prob=given).moe.renormalise is expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_refuses_what_it_cannot_do(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(**overrides)
