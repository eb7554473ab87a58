"""Greedy continuations through the whole engine equal transformers', however the work is cut up and whoever shares the batch."""

import numpy as np
import pytest
from cases import FIXTURES, LOGIT_TOLERANCE, MODELS

from tpu_serve import LLM, SamplingParams

COMMON = {"dtype": "float32", "max_num_seqs": 8, "page_size": 8, "max_model_len": 256}


@pytest.fixture(scope="module", params=MODELS)
def folder(request):
    return FIXTURES / request.param


@pytest.fixture(scope="module")
def golden(folder):
    return np.load(folder / "golden.npz")


@pytest.fixture(scope="module")
def wide(folder):
    """A budget that holds every prompt whole."""
    return LLM(str(folder), token_buckets=(192,), max_num_batched_tokens=192, **COMMON)


@pytest.fixture(scope="module")
def narrow(folder):
    """A budget far below the prompts, and fewer pages than the three answers need together."""
    return LLM(
        str(folder), token_buckets=(16,), max_num_batched_tokens=16, num_pages=34, enable_prefix_caching=False, **COMMON
    )


def greedy(count=24, **values):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **values)


def check_prompt(output, golden, prompt):
    choice = output.outputs[0]
    assert list(choice.token_ids) == golden[f"greedy_{prompt}"].tolist()


def prompts(golden):
    return [golden[f"prompt_{i}"].tolist() for i in range(3)]


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_whole_prompt_with_logprobs(wide, golden, prompt):
    wide.engine.core.scheduler.cache.reset()
    (output,) = wide.generate(prompts(golden)[prompt], greedy(logprobs=5))
    check_prompt(output, golden, prompt)
    for step, logprobs in enumerate(output.outputs[0].logprobs):
        assert [token for token, _ in logprobs.top] == golden[f"top5_ids_{prompt}"][step].tolist()
        np.testing.assert_allclose(
            [value for _, value in logprobs.top], golden[f"top5_logprobs_{prompt}"][step], atol=LOGIT_TOLERANCE
        )
        assert logprobs.logprob == logprobs.top[0][1]


def test_chunked(narrow, golden):
    for prompt in range(3):
        (output,) = narrow.generate(prompts(golden)[prompt], greedy())
        check_prompt(output, golden, prompt)


def test_batched_with_strangers(wide, golden):
    rng = np.random.default_rng(5)
    strangers = [rng.integers(0, 448, rng.integers(1, 90)).tolist() for _ in range(9)]
    mixed = [*strangers[:4], *prompts(golden), *strangers[4:]]
    params = [SamplingParams(temperature=1.0, max_tokens=30, seed=i) for i in range(len(mixed))]
    params[4:7] = [greedy()] * 3
    for prompt, output in enumerate(wide.generate(mixed, params)[4:7]):
        check_prompt(output, golden, prompt)


def test_after_preemption(narrow, golden):
    stats = narrow.engine.core.scheduler.stats
    before = stats.num_preemptions
    outputs = narrow.generate(prompts(golden)[::-1] * 2, greedy())
    assert stats.num_preemptions > before
    for index, output in enumerate(outputs):
        check_prompt(output, golden, 2 - index % 3)
    narrow.engine.core.scheduler.check()
    assert narrow.engine.core.scheduler.cache.usage == 0


@pytest.mark.parametrize("length", [7, 8, 9, 17, None])
def test_with_prefix_cache_hits(wide, golden, length):
    """Second and third time around, the leading whole pages come from the cache and nothing changes."""
    prompt = prompts(golden)[2][:length]
    length = len(prompt)
    wide.engine.core.scheduler.cache.reset()
    first, *again = (wide.generate(prompt, greedy(logprobs=3))[0] for _ in range(3))
    assert first.num_cached_tokens == 0
    for output in again:
        assert output.num_cached_tokens == (length - 1) // 8 * 8
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in output.outputs[0].logprobs],
            [entry.logprob for entry in first.outputs[0].logprobs],
            atol=1e-4,
        )
    if length == len(golden["prompt_2"]):
        check_prompt(again[0], golden, 2)


def test_identical_prompts_in_one_step_share_pages(wide, golden):
    wide.engine.core.scheduler.cache.reset()
    (output,) = wide.generate(prompts(golden)[1], greedy(n=3))
    assert [choice.token_ids for choice in output.outputs] == [tuple(golden["greedy_1"].tolist())] * 3


def test_compile_counter_is_flat(wide, narrow, golden):
    before = wide.engine.core.runner.compile_count
    for llm in (wide, narrow):
        llm.generate(
            prompts(golden),
            SamplingParams(max_tokens=3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, logprobs=20, n=2),
        )
    assert wide.engine.core.runner.compile_count == before
