"""From user parameters to engine requests: limits, defaults, seeds, choices."""

import pytest

from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.request import InvalidRequest, SamplingParams

INFO = ModelInfo(
    name="m",
    architecture="A",
    max_model_len=100,
    vocab_size=50,
    eos_token_ids=frozenset({1, 2}),
    default_params={"temperature": 0.6, "top_k": 20},
)


def make(prompt=(3, 4), **values):
    return Intake(INFO, seed=0).requests("id", prompt, SamplingParams(**values))


def test_model_defaults_hold_unless_sent_and_none_is_not_sent():
    intake = Intake(INFO)
    params = intake.params(top_k=None, top_p=0.5)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    assert intake.params(temperature=0).temperature == 0


@pytest.mark.parametrize(("asked", "granted"), [(None, 98), (5, 5), (98, 98), (99, 98), (10**6, 98)])
def test_max_tokens_is_clipped_to_the_context(asked, granted):
    assert make(max_tokens=asked)[0].params.max_tokens == granted


def test_one_request_per_choice():
    requests = make(n=3, seed=-5)
    assert [request.id for request in requests] == ["id", "id#1", "id#2"]
    assert [request.choice for request in requests] == [0, 1, 2]
    assert {request.seed for request in requests} == {-5}
    assert {request.eos_token_ids for request in requests} == {frozenset({1, 2})}


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed():
    def draw(seed):
        intake = Intake(INFO, seed)
        return [intake.requests("x", (3,), SamplingParams())[0].seed for _ in range(5)]

    assert draw(0) == draw(0) != draw(1)
    assert len(set(draw(0))) == 5


@pytest.mark.parametrize(
    ("prompt", "reason", "words"),
    [
        ((), "empty_prompt", "empty"),
        ((3, 50), "out_of_vocabulary", r"50 is out of vocabulary: ids must be in \[0, 50\)"),
        ((-1,), "out_of_vocabulary", "-1 is out of vocabulary"),
        ((2**63,), "out_of_vocabulary", "out of vocabulary"),
        (
            (3,) * 100,
            "context_length_exceeded",
            "maximum context length is 100 tokens. However, your prompt contains 100",
        ),
    ],
)
def test_bad_prompts(prompt, reason, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        make(prompt)
    assert (caught.value.reason, caught.value.param, caught.value.status) == (reason, "prompt", 400)


def test_stop_token_ids_outside_the_vocabulary():
    with pytest.raises(InvalidRequest, match="out of vocabulary") as caught:
        make(stop_token_ids=[49, 50])
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", [0, -1, 129, 1.5, True, "2"]),
        ("max_tokens", [0, -1, 2**31, 1.0]),
        ("temperature", [-0.1, 2.1, float("nan"), float("inf"), "1", True]),
        ("top_p", [0, -0.1, 1.01, float("nan")]),
        ("top_k", [-2, 1.5, True]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("seed", [2**63, -(2**63) - 1, 1.5, "1"]),
        ("stop", ["", ["a", ""], ["x"] * 17, [1]]),
        ("stop_token_ids", [[-1], [1.5], ["a"]]),
        ("logprobs", [-1, 21, 1.0, True]),
    ],
)
def test_every_bad_value_names_its_field(field, bad):
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field, value
        assert field in caught.value.message


def test_boundaries_are_allowed():
    SamplingParams(
        n=128, max_tokens=1, temperature=2.0, top_p=1e-9, top_k=-1, min_p=1.0, seed=2**63 - 1, stop="x", logprobs=0
    )
    SamplingParams(temperature=0, top_p=1, top_k=10**9, min_p=0, seed=-(2**63), stop=["x"] * 16, logprobs=20)
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy
