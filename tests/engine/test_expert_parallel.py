"""An engine on several devices, experts split over them, says what an engine on one device says."""

import jax
import numpy as np
import pytest
from cases import FIXTURES

from tpu_serve import LLM, ConfigError, SamplingParams
from tpu_serve.engine import build
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model

# A budget far below the prompts and fewer pages than the answers need together: chunks and preemptions are part of every run.
COMMON = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "page_size": 8,
    "max_model_len": 256,
    "token_buckets": (16,),
    "max_num_batched_tokens": 16,
    "num_pages": 34,
    "enable_prefix_caching": False,
}
# Some devices get experts that no token goes to, or only such. All have 2 KV heads: more devices hold some of them twice, or four times.
CASES = [
    ("qwen3_moe", "ragged", 2),
    ("qwen3_moe", "ragged", 3),  # 8 query heads: attention is copied; and 512 token ids
    ("qwen3_moe", "ragged", 8),
    ("mixtral", "dense", 3),
    ("gpt_oss", "ragged", 8),  # biases, sinks
    ("gemma4", "ragged", 2),  # layers with as many KV heads and others with one
    ("qwen3_next", "ragged", 4),  # recurrent state, with fewer key heads than devices
]


def engine(name, num_devices=1, **options):
    return LLM(str(FIXTURES / name), tensor_parallel_size=num_devices, **COMMON, **options)


@pytest.mark.parametrize(("name", "backend", "num_devices"), CASES)
def test_greedy_answers_are_those_of_one_device(name, backend, num_devices):
    golden = np.load(FIXTURES / name / "golden.npz")
    llm = engine(name, num_devices, moe_backend=backend)
    runner, before = llm.engine.core.runner, llm.engine.core.runner.compile_count
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    outputs = llm.generate(prompts * 2, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for index, output in enumerate(outputs):
        assert list(output.outputs[0].token_ids) == golden[f"greedy_{index % 3}"].tolist()
    assert llm.engine.core.scheduler.stats.num_preemptions > 0
    assert runner.compile_count == before
    weights = runner.params["layers"][0]["experts"]["gate_up"]
    assert len(weights.sharding.device_set) == num_devices
    num_experts = build_model(read_config(FIXTURES / name)).moe.num_experts
    assert len(weights.addressable_shards[0].data) == -(-num_experts // num_devices)


@pytest.fixture(scope="module")
def pair():
    """The same model on one device and on two."""
    return engine("qwen3_moe"), engine("qwen3_moe", 2)


def test_seeds_and_logprobs_are_those_of_one_device(pair):
    prompts = [[7, 8, 9], list(range(40, 75)), [300]]
    params = SamplingParams(temperature=1.2, top_k=40, top_p=0.95, max_tokens=16, seed=3, logprobs=4, ignore_eos=True)
    one, two = (llm.generate(prompts, params) for llm in pair)
    for first, second in zip(one, two, strict=True):
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        for mine, other in zip(first.outputs[0].logprobs, second.outputs[0].logprobs, strict=True):
            assert [token for token, _ in mine.top] == [token for token, _ in other.top]
            np.testing.assert_allclose(mine.logprob, other.logprob, atol=1e-4)


PRIME = {"load_format": "dummy", "hf_overrides": {"vocab_size": 509, "num_hidden_layers": 1}}
ASKED = [
    {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 2},
    {"temperature": 1.5, "seed": 1, "logprobs": 5},
    {"temperature": 1.5, "seed": 2, "top_p": 0.8, "top_k": 300, "min_p": 1e-4, "logprobs": 1},
    {"temperature": 2.0, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {508: 3.0}},
]


def test_a_vocabulary_that_no_devices_divide():
    """The table is filled up, and nobody sees it: neither in what is drawn nor in what is reported."""
    prompts, params = [[7, 8, 508]] * 4, [SamplingParams(max_tokens=8, ignore_eos=True, **asked) for asked in ASKED]
    engines = {num: engine("qwen3_moe", num, **PRIME) for num in (1, 2, 3)}
    for num, llm in engines.items():
        table = llm.engine.core.runner.params["lm_head"]
        assert table.shape[0] == 509 + -509 % num == num * table.addressable_shards[0].data.shape[0]
    one, *others = (llm.generate(prompts, params) for llm in engines.values())
    for results in others:
        for mine, other in zip(one, results, strict=True):
            assert mine.outputs[0].token_ids == other.outputs[0].token_ids
            for left, right in zip(reported(mine), reported(other), strict=True):
                assert [token for token, _ in left.top] == [token for token, _ in right.top]
                values, same = ([entry.logprob, *(value for _, value in entry.top)] for entry in (left, right))
                np.testing.assert_allclose(values, same, atol=1e-4)


def reported(result):
    """Log-probabilities of a prompt, behind its first token, and of the answer."""
    return [*(result.prompt_logprobs or ())[1:], *(result.outputs[0].logprobs or ())]


@pytest.mark.parametrize("which", [0, 1])
def test_a_step_writes_into_the_cache_where_it_lies(pair, which):
    llm = pair[which]
    state = llm.engine.core.runner._state

    def places():
        state = llm.engine.core.runner._state
        return [shard.data.unsafe_buffer_pointer() for shard in state.caches[0].addressable_shards]

    before, sharding = places(), state.caches[0].sharding
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert llm.engine.core.runner._state.caches[0].sharding == sharding
    assert places() == before
    assert len(set(before)) == which + 1


def test_what_the_devices_divide_is_split(pair):
    runner = pair[1].engine.core.runner
    split = {
        "embedding": runner.params["embedding"],
        "queries": runner.params["layers"][0]["attention"]["q_proj"],
        "keys": runner.params["layers"][0]["attention"]["k_proj"],
        "cache": runner._state.caches[0],
    }
    for name, array in split.items():
        assert 2 * array.addressable_shards[0].data.size == array.size, name


def test_more_devices_than_there_are_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(build, "load_params", lambda *_, **__: pytest.fail("the weights were read"))
    count = len(jax.devices()) + 1
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {count} is more than the {count - 1} cpu devices"):
        engine("qwen3_moe", count)


@pytest.mark.parametrize(("name", "num_devices"), [("qwen3_moe", 2), ("mixtral", 4)])
def test_greedy_answers_with_the_fused_kernel(name, num_devices):
    """The kernel in simulation, prompts in chunks: the answers of one device with XLA, token for token."""
    golden = np.load(FIXTURES / name / "golden.npz")
    llm = engine(name, num_devices, moe_backend="fused")
    prompts = [golden[f"prompt_{i}"].tolist()[:18] for i in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    plain = engine(name).generate(prompts, params)
    for output, expected in zip(llm.generate(prompts, params), plain, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
