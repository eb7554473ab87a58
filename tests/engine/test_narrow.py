"""Weights, and keys and values, in 8 bits and less: what the whole engine says, and what it refuses."""

import jax
import numpy as np
import pytest
from cases import FIXTURES, LOGIT_TOLERANCE, QUANTISED

from tpu_serve import LLM, ConfigError, SamplingParams
from tpu_serve.device.quantised import QuantisedArray

COMMON = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "page_size": 8,
    "max_model_len": 256,
    "token_buckets": (64,),
    "max_num_batched_tokens": 64,
    "compile_cache_dir": "off",
}


def engine(name, **options):
    return LLM(str(FIXTURES / name), **COMMON, **options)


def answers(llm, golden, **values):
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **values)
    return [output.outputs[0] for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_checkpoint_says_what_its_restored_weights_say(name):
    golden = np.load(FIXTURES / name / "golden.npz")
    for i, answer in enumerate(answers(engine(name), golden, logprobs=5)):
        assert list(answer.token_ids) == golden[f"greedy_{i}"].tolist()
        for step, logprobs in enumerate(answer.logprobs):
            np.testing.assert_allclose(
                [value for _, value in logprobs.top], golden[f"top5_logprobs_{i}"][step], atol=LOGIT_TOLERANCE
            )


def is_near(llm, golden, most):
    """Whether the first answered tokens have about the log probabilities of the exact model."""
    distances = [
        abs(answer.logprobs[0].logprob - golden[f"top5_logprobs_{i}"][0][0])
        for i, answer in enumerate(answers(llm, golden, logprobs=1))
    ]
    assert max(distances) > LOGIT_TOLERANCE, "nothing was quantised"
    return max(distances) < most


@pytest.mark.parametrize(("quantization", "values"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_experts_are_quantised_while_they_are_loaded(quantization, values, caplog):
    golden = np.load(FIXTURES / "qwen3_moe" / "golden.npz")
    with caplog.at_level("INFO"):
        llm = engine("qwen3_moe", quantization=quantization)
    assert "relative error of 6 weights" in caplog.text
    for layer in llm.engine.core.runner.params["layers"]:
        for weight in (layer["experts"]["gate_up"], layer["experts"]["down"]):
            assert isinstance(weight, QuantisedArray)
            assert weight.values.dtype == values
    assert is_near(llm, golden, 0.1 if quantization == "int8" else 0.5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_and_values_in_8_bits(kind):
    golden = np.load(FIXTURES / "qwen3_moe" / "golden.npz")
    llm = engine("qwen3_moe", kv_cache_dtype=kind)
    narrow = jax.tree.leaves(llm.engine.core.runner._state.caches)
    assert {leaf.dtype.name for leaf in narrow} == {"int8" if kind == "int8" else "uint8", "float32"}
    assert is_near(llm, golden, 0.1 if kind == "int8" else 0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen3_moe_fp8", {"quantization": "int8"}, r"--quantization int8 is for checkpoints that are not quantised"),
        ("qwen3", {"quantization": "fp8"}, r"Qwen3ForCausalLM has no experts, which --quantization would be about"),
        ("qwen3", {"moe_backend": "dense"}, r"has no experts, which --moe-backend would be about"),
        ("qwen3", {"num_state_snapshots": 4}, r"--num-state-snapshots 4 is for models with recurrent layers"),
        ("qwen3_next", {"kv_cache_memory_bytes": 5000}, r"Recurrent state of 8 slots .* Use more memory"),
    ],
)
def test_options_that_cannot_be_honoured(name, options, message):
    with pytest.raises(ConfigError, match=message):
        engine(name, **options)
