"""Several decode steps in one launch give what single steps give, whatever a request asks and whatever else runs.

One engine per family: the number of steps is no constant of its programs, so the scheduler alone says how many a launch has.
"""

import dataclasses

import numpy as np
import pytest
from cases import FIXTURES
from test_sampling_state import Allowing, run

from tpu_serve import LLM
from tpu_serve.config import ConfigError
from tpu_serve.request import Bias, FinishReason, Request, SamplingParams

MOST, COUNT, SMALLEST_VOCABULARY = 5, 22, 200
# Fewer pages than the answers need together, so that sequences lose theirs; snapshots of recurrent state at every other launch.
OPTIONS = {
    "dtype": "float32", "max_num_seqs": 4, "page_size": 4, "max_model_len": 64, "token_buckets": (16,),
    "max_num_batched_tokens": 16, "num_pages": 34, "num_decode_steps": MOST,
}  # fmt: skip
FAMILIES = ("qwen3_moe", "qwen3_next", "gemma4")  # attention to all, recurrent state, sliding windows


@pytest.fixture(scope="module", params=FAMILIES)
def core(request):
    options = OPTIONS | ({"num_state_snapshots": 6} if request.param == "qwen3_next" else {})
    return LLM(str(FIXTURES / request.param), **options).engine.core


def ask(name, seed, length, **values):
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | values.pop("params", {})
    prompt = np.random.default_rng(seed).integers(0, SMALLEST_VOCABULARY, length)
    return Request(
        id=name, prompt_token_ids=tuple(prompt.tolist()), params=SamplingParams(**params), seed=seed, **values
    )


def all_requests():
    hot = {"temperature": 1.4, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 2}
    return [
        ask("plain", 1, 9),
        ask("hot", 2, 13, params=hot),
        ask("repetition", 3, 7, params={"repetition_penalty": 1.8, "logprobs": 3}),
        ask("presence", 4, 21, params={"presence_penalty": 2.0, "frequency_penalty": 0.5}),
        ask("hot and penalised", 5, 5, params=hot | {"frequency_penalty": 1.0}, biases=(Bias(5, 9.0, until=11),)),
        ask("short", 6, 1, params={"max_tokens": 7}),
        ask("scored", 7, 10, params={"prompt_logprobs": 1, "logprobs": 0}),
        ask("script", 8, 6, forced_token_ids=tuple(range(40, 40 + COUNT)), params={"presence_penalty": 1.0}),
    ]


def answers(core, num_steps, requests):
    """By request: tokens, log-probabilities and how it ended; and how many steps the launches had."""
    core.scheduler.num_decode_steps = num_steps
    assert core.reset_prefix_cache()
    launches, before = [], core.runner.compile_count
    core.on_step = lambda output, _: launches.append(output.num_steps)
    found = {}
    for name, outputs in run(core, requests).items():
        tokens = [token for one in outputs for token in one.token_ids]
        scores = [entry for one in outputs for entry in one.logprobs or ()]
        found[name] = tokens, scores, outputs[-1].finish_reason, outputs[-1].stop_token_id
        assert not scores or [entry.token_id for entry in scores] == tokens
    assert core.runner.compile_count == before
    assert core.scheduler.cache.usage == 0
    return found, launches


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, (tokens, scores, *ending) in expected.items():
        assert (found[name][0], *found[name][2:]) == (tokens, *ending), name
        assert [entry.logprob for entry in found[name][1]] == pytest.approx([one.logprob for one in scores], abs=1e-4)
        assert [[token for token, _ in one.top] for one in found[name][1]] == [
            [token for token, _ in one.top] for one in scores
        ]


def test_every_option_in_any_number_of_steps(core):
    expected, launches = answers(core, 1, all_requests())
    assert set(launches) == {1}
    num_preemptions = core.scheduler.stats.num_preemptions
    assert num_preemptions
    for num_steps in (2, MOST):
        found, launches = answers(core, num_steps, all_requests())
        check_equal(found, expected)
        assert max(launches) == num_steps
        assert core.scheduler.stats.num_preemptions > num_preemptions
        num_preemptions = core.scheduler.stats.num_preemptions


def test_an_answer_that_ends_in_the_middle(core):
    """By a stop token, an end of sequence, and one of more stop tokens than the device looks for."""
    plain = all_requests()[0]
    whole = answers(core, 1, [plain])[0]["plain"][0]
    place = max(index for index, token in enumerate(whole[:-3]) if token not in whole[:index])
    last = whole[place]
    others = tuple(token for token in range(60) if token not in whole)
    stopped = dataclasses.replace(plain.params, stop_token_ids=(others[0], last))
    ended = dataclasses.replace(plain.params, ignore_eos=False)
    many = dataclasses.replace(plain.params, stop_token_ids=(*others, last))
    requests = [
        dataclasses.replace(plain, id="stopped", params=stopped),
        dataclasses.replace(plain, id="ended", params=ended, eos_token_ids=frozenset({last})),
        dataclasses.replace(plain, id="many", params=many),
    ]
    for num_steps in (2, 3, MOST):
        found, _ = answers(core, num_steps, requests)
        assert found == {
            "stopped": (whole[: place + 1], [], FinishReason.STOP, last),
            "ended": (whole[: place + 1], [], FinishReason.STOP, None),
            "many": (whole[: place + 1], [], FinishReason.STOP, last),
        }


def test_a_conversation_goes_on_from_what_several_steps_have_cached(core):
    """An answer of every length is continued, so that pages end before, at and behind its last token."""
    for count in range(8, 13):
        first = ask("first", 30, 7, params={"max_tokens": count})
        core.scheduler.num_decode_steps = MOST
        assert core.reset_prefix_cache()
        (output,) = run(core, [first]).values()
        said = tuple(token for one in output for token in one.token_ids)
        prompt = (*first.prompt_token_ids, *said, 9, 8, 7, 6)
        second = dataclasses.replace(first, id="second", prompt_token_ids=prompt)
        (cached,) = run(core, [second]).values()
        assert cached[0].num_cached_tokens > first.params.max_tokens - OPTIONS["page_size"]
        found, _ = answers(core, 1, [second])
        assert [token for one in cached for token in one.token_ids] == found["second"][0]


def test_a_constrained_neighbour_makes_steps_single(core):
    in_turn = Allowing(lambda token, place: token % 3 == place % 3, size=core.runner._programs.vocab_size)
    turns = ask("turns", 12, 6, constraint=in_turn, params={"max_tokens": 9})
    requests = [*all_requests()[:3], turns]
    expected, _ = answers(core, 1, requests)
    found, launches = answers(core, MOST, requests)
    check_equal(found, expected)
    assert launches[:9] == [1] * 9
    assert max(launches) == MOST


def test_combinations_that_do_not_work():
    with pytest.raises(ConfigError, match="--num-decode-steps 2 cannot be used with --data-parallel-size 2"):
        LLM(num_decode_steps=2, data_parallel_size=2)
    with pytest.raises(ConfigError, match="--num-decode-steps must be at most 128, got 129"):
        LLM(num_decode_steps=129)
