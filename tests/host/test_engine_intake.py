"""From user parameters to engine requests: limits, defaults, seeds, choices."""

import dataclasses
import math

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from watcher import Watcher

from tpu_serve.constraint.masks import ids_of
from tpu_serve.engine.admission import AdmissionRate
from tpu_serve.engine.biases import banned_sequences
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.request import MAX_BIASES, InvalidRequest, SamplingParams
from tpu_serve.text.tokenizer import Tokenizer

INFO = ModelInfo(
    name="m",
    architecture="A",
    max_model_len=100,
    vocab_size=50,
    eos_token_ids=frozenset({1, 2}),
    default_params={"temperature": 0.6, "top_k": 20},
)


def make(prompt=(3, 4), **values):
    return Intake(INFO, seed=0, tokenizer=TOKENIZER).requests("id", prompt, SamplingParams(**values))


def small_tokenizer():
    """Words of the letters a, b, c and the space; " a" and "ab" are tokens."""
    vocabulary = {text: index for index, text in enumerate(["a", "b", "c", "Ġ", "Ġa", "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ġ", "a"), ("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


TOKENIZER = small_tokenizer()


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
        ("presence_penalty", [-2.1, 2.1, float("nan"), "1", True]),
        ("frequency_penalty", [-2.1, 2.1, float("inf")]),
        ("repetition_penalty", [0, -1, float("nan"), float("inf")]),
        ("logit_bias", [{-1: 0}, {3: 100.5}, {3: float("nan")}, {"3": 1}]),
        ("min_tokens", [-1, 1.5, True]),
        ("bad_words", ["", ["a", ""], ["a"] * 129]),
        ("allowed_token_ids", [[], [-1], ["3"]]),
        ("prompt_logprobs", [-1, 21]),
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


# ---- what is added to logits ----------------------------------------------------------------------------------------


def biases(**values):
    """(id, value, until) of the entries, `None` for ever, in order of ids."""
    (request,) = make(**values)
    ever = 2**31 - 1
    return sorted(
        (entry.token_id, entry.value, None if entry.until == ever else entry.until) for entry in request.biases
    )


def test_biases_are_the_requests_own():
    assert biases(logit_bias={7: 1.5, 3: -100, 9: 0}) == [(3, -100, None), (7, 1.5, None)]
    assert biases(logit_bias=((7, 1), (7, 2))) == [(7, 2, None)], "the last one counts, as in JSON"
    assert biases() == []


def test_min_tokens_forbids_every_end_until_then():
    assert biases(min_tokens=4) == [(1, -math.inf, 4), (2, -math.inf, 4)]
    assert biases(min_tokens=4, stop_token_ids=[9, 2]) == [(i, -math.inf, 4) for i in (1, 2, 9)]
    assert biases(min_tokens=4, stop_token_ids=[9], ignore_eos=True) == [(9, -math.inf, 4)]
    assert biases(min_tokens=4, logit_bias={1: 100}) == [(1, -math.inf, 4), (1, 100, None), (2, -math.inf, 4)]
    assert biases(min_tokens=0, stop_token_ids=[9]) == []


def test_a_bad_word_of_one_token_is_forbidden_whatever_its_bias():
    assert biases(bad_words=["a"], logit_bias={0: 100, 5: 1}) == [
        (0, -math.inf, None),
        (4, -math.inf, None),
        (5, 1, None),
    ]
    assert biases(bad_words=["a"], min_tokens=3, stop_token_ids=[0]) == [
        (0, -math.inf, None),
        (1, -math.inf, 3),
        (2, -math.inf, 3),
        (4, -math.inf, None),
    ]


def test_bad_words_are_banned_with_and_without_a_space_in_front():
    assert banned_sequences(["a"], TOKENIZER) == [(0,), (4,)]
    assert banned_sequences([" a"], TOKENIZER) == [(0,), (4,)]
    assert banned_sequences(["bc", " bc", "ab"], TOKENIZER) == [(1, 2), (3, 1, 2), (5,), (4, 1)]
    with pytest.raises(InvalidRequest, match="1025 tokens; at most 1024") as caught:
        banned_sequences(["bc" * 256], TOKENIZER)
    assert caught.value.param == "bad_words"


def test_bad_words_with_tokens_that_the_model_lacks():
    """A tokenizer may be wider than the model: " a" and "ab" can never come, so only what can is banned."""
    narrow = Intake(dataclasses.replace(INFO, vocab_size=4), tokenizer=TOKENIZER)
    (request,) = narrow.requests("id", [3], SamplingParams(bad_words=["a", "cab"]))
    assert [bias.token_id for bias in request.biases] == [0]
    assert request.constraint is None


def test_bad_words_of_several_tokens_and_allowed_ids_are_a_constraint():
    (request,) = make(bad_words=["bc"], allowed_token_ids=[1, 2, 5])
    constraint = request.constraint.copy()
    assert constraint.follows
    assert ids_of(constraint.mask) == [1, 2, 5]
    constraint.accept(1)
    assert ids_of(constraint.mask) == [1, 5]
    assert not make(allowed_token_ids=[1])[0].constraint.follows
    assert make()[0].constraint is None


def test_a_constraint_that_is_given_holds_as_well():
    watcher = Watcher(True, mask=b"\x0f" + b"\x00" * 7)
    (request,) = Intake(INFO).requests("id", (3,), SamplingParams(allowed_token_ids=[2, 3, 4]), constraint=watcher)
    assert ids_of(request.constraint.mask) == [2, 3]
    (alone,) = Intake(INFO).requests("id", (3,), SamplingParams(), constraint=watcher)
    assert alone.constraint is watcher


def test_too_many_biases_are_refused_with_the_numbers():
    info = dataclasses.replace(INFO, vocab_size=2000)
    intake = Intake(info, tokenizer=TOKENIZER)
    full = {token_id: 1 for token_id in range(10, 10 + MAX_BIASES)}
    assert len(intake.requests("id", (3,), SamplingParams(logit_bias=full))[0].biases) == MAX_BIASES
    with pytest.raises(
        InvalidRequest, match=rf"logit_bias \({MAX_BIASES} tokens\).*stop tokens \(2\).* 514 logits; at most 512"
    ) as caught:
        intake.requests("id", (3,), SamplingParams(logit_bias=full, min_tokens=1))
    assert (caught.value.param, caught.value.reason) == ("logit_bias", "too_many_biases")
    with pytest.raises(InvalidRequest) as caught:
        intake.requests("id", (3,), SamplingParams(stop_token_ids=list(full), min_tokens=1))
    assert caught.value.param == "stop_token_ids"


# ---- fields that the model limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary_name_their_field(field):
    for bad in (50, 2**31 - 1):
        with pytest.raises(InvalidRequest, match=f"Token id {bad} is out of vocabulary") as caught:
            make(**{field: {bad: 1.0} if field == "logit_bias" else [bad]})
        assert (caught.value.param, caught.value.reason) == (field, "out_of_vocabulary")
    make(**{field: {49: 1.0} if field == "logit_bias" else [49]})


def test_a_script_is_checked_and_belongs_to_every_choice():
    requests = Intake(INFO).requests("id", (3,), SamplingParams(n=2), forced_token_ids=[7, 8], shown_token_ids=[9])
    assert {request.forced_token_ids for request in requests} == {(7, 8)}
    assert {request.shown_token_ids for request in requests} == {frozenset({9})}
    (request,) = Intake(INFO).requests("id", (3,), SamplingParams(allowed_token_ids=[1]), forced_token_ids=[7])
    assert request.constraint is None, "a script is stronger than what is allowed"
    with pytest.raises(InvalidRequest, match="50 is out of vocabulary") as caught:
        Intake(INFO).requests("id", (3,), SamplingParams(), forced_token_ids=[50])
    assert caught.value.param == "scripted_token_ids"


def test_priorities_need_their_policy():
    with pytest.raises(InvalidRequest, match="--scheduling-policy priority") as caught:
        Intake(INFO).requests("id", (3,), SamplingParams(), priority=-1)
    assert (caught.value.param, caught.value.reason) == ("priority", "unsupported_parameter")
    intake = Intake(dataclasses.replace(INFO, scheduling_policy="priority"))
    assert intake.requests("id", (3,), SamplingParams(), priority=-1)[0].priority == -1
    for bad in (2**63, -(2**63) - 1):
        with pytest.raises(InvalidRequest, match="64-bit"):
            intake.requests("id", (3,), SamplingParams(), priority=bad)


def test_the_server_may_allow_fewer_logprobs():
    intake = Intake(dataclasses.replace(INFO, max_logprobs=5))
    intake.requests("id", (3,), SamplingParams(logprobs=5, prompt_logprobs=5))
    for field, word in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
        with pytest.raises(
            InvalidRequest, match=f"Requested {word} logprobs of 6, which is greater than max allowed: 5"
        ) as caught:
            intake.requests("id", (3,), SamplingParams(**{field: 6}))
        assert caught.value.param == field


def test_a_prompt_that_may_never_wait_is_refused():
    intake = Intake(dataclasses.replace(INFO, max_num_queued_tokens=5))
    intake.requests("id", (3,) * 5, SamplingParams())
    with pytest.raises(InvalidRequest, match=r"6 tokens, more than the 5 .*--max-num-queued-tokens") as caught:
        intake.requests("id", (3,) * 6, SamplingParams())
    assert (caught.value.param, caught.value.status) == ("prompt", 400)


def test_min_tokens_is_clipped_with_the_length():
    assert make((3,) * 90, min_tokens=50, max_tokens=60)[0].params.min_tokens == 10
    with pytest.raises(InvalidRequest, match=r"min_tokens \(5\) must not be larger than max_tokens \(4\)"):
        make(min_tokens=5, max_tokens=4)
    intake = Intake(dataclasses.replace(INFO, default_params={"min_tokens": 5}))
    assert intake.params().min_tokens == 5
    assert intake.params(max_tokens=3).min_tokens == 3, "nobody is blamed for a default"
    assert intake.params(min_tokens=0).min_tokens == 0


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequest, match="detokenize") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


# ---- how long to stay away ------------------------------------------------------------------------------------------


def test_the_time_until_the_queue_is_empty_is_measured():
    now = [100.0]
    rate = AdmissionRate(lambda: now[0])
    assert rate.seconds_until_drained(50) == 1, "nothing is known yet"
    for _ in range(20):  # two a second
        rate.left_queue()
        now[0] += 0.5
    assert rate.seconds_until_drained(0) == 1
    assert rate.seconds_until_drained(30) == 15
    assert rate.seconds_until_drained(10_000) == 60
    now[0] += 28  # a stall: of those only four in the last half a minute count
    assert rate.seconds_until_drained(3) == 23
    now[0] += 1000
    assert rate.seconds_until_drained(1) == 60
