"""The least time of a step: pairs of tokens and keys against counting, bytes and products against the files of a model."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tpu_serve.bench.bound import Bound, LaunchedStep, design_of
from tpu_serve.config import EMBEDDED_MODEL, EngineConfig
from tpu_serve.device.chip import Chip

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=50)
@given(ROWS, st.none() | st.integers(1, 30))
def test_what_tokens_see_is_counted(rows, window):
    step = LaunchedStep.of_rows(rows)
    seen, keys = 0, set()
    for number, (start, length) in enumerate(rows):
        for position in range(start, start + length):
            visible = range(0 if window is None else max(0, position + 1 - window), position + 1)
            seen += len(visible)
            keys |= {(number, key) for key in visible}
    assert step.num_seen(window) == seen
    assert step.num_keys(window) == len(keys)
    assert step.num_tokens == sum(length for _, length in rows)
    assert step.num_sequences == len(rows)


def rated(*, bytes_per_second, operations_per_second):
    rates = dict.fromkeys(("float32", "bfloat16", "int8"), operations_per_second)
    chip = Chip(
        "cpu", 2**34, page_size=16, max_num_seqs=4, max_num_batched_tokens=64, bucket_growth=4, hbm_bytes_per_second=bytes_per_second,
        peak_ops=rates,
    )  # fmt: skip
    return Bound(design_of(EngineConfig.from_options(), chip), 16, "measured")


def shapes():
    """Of the embedded model's tensors, by name."""
    found = {}
    for file in EMBEDDED_MODEL.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return found


def num_values(shape):
    size = 1
    for length in shape:
        size *= length
    return size


def test_a_token_reads_its_experts_and_everything_else_once():
    config, tensors = json.loads((EMBEDDED_MODEL / "config.json").read_text()), shapes()
    share = config["num_experts_per_tok"] / config["num_experts"]
    expected = 0.0
    for name, shape in tensors.items():
        if ".experts." in name:
            expected += share * num_values(shape)
        elif "embed_tokens" in name and "lm_head.weight" in tensors:
            expected += config["hidden_size"]
        else:
            expected += num_values(shape)
    cached = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    expected += cached * (41 + 1)  # 41 keys are read, one is written
    bound = rated(bytes_per_second=1e6, operations_per_second=1e30)
    assert bound.seconds([(40, 1)]) == pytest.approx(2 * expected / 1e6, rel=1e-3), "bfloat16"


def test_tokens_of_a_prompt_are_multiplied():
    config, tensors = json.loads((EMBEDDED_MODEL / "config.json").read_text()), shapes()
    share = config["num_experts_per_tok"] / config["num_experts"]
    head = config["vocab_size"] * config["hidden_size"]
    layers = sum(
        num_values(shape) * (share if ".experts." in name else 1)
        for name, shape in tensors.items()
        if len(shape) >= 2 and "embed_tokens" not in name and "lm_head" not in name
    )
    seen = 4 * config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"] * 32 * 33 / 2
    bound = rated(bytes_per_second=1e30, operations_per_second=1e6)
    assert bound.seconds([(0, 32)]) == pytest.approx((2 * 32 * layers + 2 * head + seen) / 1e6, rel=1e-3)
