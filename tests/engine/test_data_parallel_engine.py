"""Data ranks, each with sequences and a cache of its own and experts split over all of their devices, say what one device says."""

import numpy as np
import pytest
from cases import FIXTURES

from tpu_serve import LLM, SamplingParams

# A budget far below the prompts and fewer pages than the answers of a rank need together: chunks and preemptions are part of every run.
COMMON = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "page_size": 8,
    "max_model_len": 256,
    "token_buckets": (16,),
    "max_num_batched_tokens": 16,
    "num_pages": 34,
}
CASES = [  # some devices get experts that no token goes to, or only such
    ("qwen3_moe", "data=2,model=2", {}),
    ("gemma4", "data=4,model=2", {"num_pages": 25, "max_model_len": 192}),  # windows
    ("qwen3_next", "data=4", {"num_state_snapshots": 6}),  # recurrent state
]


def engine(name, mesh=None, **options):
    return LLM(str(FIXTURES / name), mesh=mesh, **COMMON | options)


@pytest.mark.parametrize(("name", "mesh", "options"), CASES)
def test_greedy_answers_are_those_of_one_device(name, mesh, options):
    golden = np.load(FIXTURES / name / "golden.npz")
    llm = engine(name, mesh, **options)
    core, ranks = llm.engine.core, llm.engine.core.scheduler.ranks
    num_programs = core.runner.compile_count
    prompts = [golden[f"prompt_{index}"].tolist() for index in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for seed in range(2):  # the second time much of it is cached
        order = np.random.default_rng(seed).permutation(6 * len(ranks)).tolist()
        outputs = llm.generate([prompts[index % 3] for index in order], params)
        for index, output in zip(order, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == golden[f"greedy_{index % 3}"].tolist()
    assert core.runner.compile_count == num_programs
    assert all(rank.stats.generated for rank in ranks)
    assert core.scheduler.stats.prefix_hits > 0
    assert core.scheduler.stats.num_preemptions > 0
    core.scheduler.check()


@pytest.fixture(scope="module")
def pair():
    """The same model on one device and on two data ranks of one device each."""
    return engine("qwen3_moe"), engine("qwen3_moe", "data=2")


def test_what_is_drawn_and_its_log_probabilities_are_those_of_one_device(pair):
    prompts = [[7, 8, 9], list(range(40, 75)), [300], list(range(90, 130))]
    params = SamplingParams(
        n=2, temperature=1.2, top_k=40, top_p=0.95, max_tokens=12, seed=3, logprobs=4, prompt_logprobs=2, ignore_eos=True,
        repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={50: 4.0},
    )  # fmt: skip
    one, two = (llm.generate(prompts, params) for llm in pair)
    for first, second in zip(one, two, strict=True):
        assert same_logprobs(first.prompt_logprobs[1:], second.prompt_logprobs[1:])
        for mine, other in zip(first.outputs, second.outputs, strict=True):
            assert mine.token_ids == other.token_ids
            assert same_logprobs(mine.logprobs, other.logprobs)


def same_logprobs(ones, others):
    np.testing.assert_allclose([one.logprob for one in ones], [one.logprob for one in others], atol=1e-4)
    return [[token for token, _ in one.top] for one in ones] == [[token for token, _ in one.top] for one in others]


def test_a_rank_without_work_waits_for_the_other(pair):
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    one, two = (llm.generate([list(range(20, 50))], params) for llm in pair)
    assert one[0].outputs[0].token_ids == two[0].outputs[0].token_ids


def test_each_rank_has_its_part_of_the_state_and_all_weights_but_experts(pair):
    runner = pair[1].engine.core.runner
    state, layer = runner._state, runner.params["layers"][0]
    split = [state.caches[0], state.last_token, state.sampler.counts, layer["experts"]["gate_up"]]
    assert [2 * array.addressable_shards[0].data.size == array.size for array in split] == [True] * 4
    assert runner.params["embedding"].sharding.is_fully_replicated
    assert len(runner.params["embedding"].sharding.device_set) == 2
    before = [shard.data.unsafe_buffer_pointer() for shard in state.caches[0].addressable_shards]
    pair[1].generate([[1, 2, 3]] * 2, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    after = [shard.data.unsafe_buffer_pointer() for shard in runner._state.caches[0].addressable_shards]
    assert after == before, "the cache is copied"


def test_greedy_answers_with_the_fused_kernel(pair):
    prompts = [list(range(30, 40)), list(range(50, 55)), [7, 8]]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    fused = engine("qwen3_moe", "data=2", moe_backend="fused").generate(prompts, params)
    for output, expected in zip(fused, pair[0].generate(prompts, params), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
