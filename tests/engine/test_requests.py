"""What requests ask for, on the embedded model: each gets what it would get alone, whatever runs beside it and however often it is preempted."""

import dataclasses
import math

import numpy as np
import pytest

from tpu_serve import LLM, InvalidRequest, SamplingParams
from tpu_serve.engine.intake import Intake
from tpu_serve.request import FinishReason

PAGE = 16
LENGTH = 128
STORY = "Once upon a time"
PROMPTS = [STORY, "The dog", "What is the capital of France? It is", "Tom and his mother went to the park. They saw"]


@pytest.fixture(scope="module")
def llm():
    """Pages for one and a half of the longest sequences."""
    return LLM(
        max_model_len=LENGTH,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        token_buckets=(32,),
        page_size=PAGE,
        num_pages=13,
        dtype="float32",
        scheduling_policy="priority",
    )


@pytest.fixture(autouse=True)
def leaves_nothing_behind(llm):
    compiled = llm.engine.core.runner.compile_count
    yield
    llm.engine.core.scheduler.check()
    assert not llm.engine.core.has_work
    assert llm.engine.core.scheduler.cache.usage == 0
    assert llm.engine.core.runner.compile_count == compiled, "a request compiled something"


def greedy(**values):
    return SamplingParams(temperature=0, **{"max_tokens": 20, **values})


def one(llm, prompt, params, **options):
    (output,) = llm.generate([prompt], params, **options)
    return output.outputs[0]


def run(llm, *requests):
    """All outputs of engine requests, by id."""
    core, outputs = llm.engine.core, {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def eos(llm):
    return min(llm.engine.info.eos_token_ids)


# ---- batch-mates, caches, preemptions -------------------------------------------------------------------------------


ASKED = {
    "plain": {},
    "seeded": {"temperature": 1.5, "seed": 42, "top_p": 0.9},
    "repetition": {"repetition_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "biased": {"logit_bias": {300: 18.0, 333: -100}},
    "patient": {"min_tokens": 30, "stop_token_ids": [13]},
    "polite": {"bad_words": [" fox", "a brave", "the", "named"]},
    "few": {"allowed_token_ids": list(range(260, 400)), "temperature": 1.0, "seed": 3},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
}


def test_everybody_gets_what_they_would_get_alone(llm):
    """Four times as many tokens as there are pages for, so that everybody is preempted at some time, penalties and constraints alike."""
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 45, "ignore_eos": True, **values})
        for values in ASKED.values()
    ]
    alone = [one(llm, STORY, each) for each in params]
    same = [name for name, output in zip(ASKED, alone, strict=True) if output.token_ids == alone[0].token_ids]
    assert same == ["plain", "scored"], "the others change something"
    for order in (range(len(params)), reversed(range(len(params)))):
        order = list(order)
        before = llm.engine.core.scheduler.stats.num_preemptions
        together = llm.generate([STORY] * len(order), [params[index] for index in order])
        assert llm.engine.core.scheduler.stats.num_preemptions > before
        for index, output in zip(order, together, strict=True):
            assert output.outputs[0].token_ids == alone[index].token_ids, list(ASKED)[index]


def test_a_seed_holds_beside_those_that_have_none(llm):
    seeded = SamplingParams(seed=42, temperature=1.5, max_tokens=12)
    free = SamplingParams(temperature=1.5, max_tokens=12)
    answers = [
        [output.outputs[0].token_ids for output in llm.generate([STORY, STORY], [seeded, free])] for _ in range(4)
    ]
    assert len({first for first, _ in answers}) == 1
    assert len({second for _, second in answers}) == 4


def test_the_first_answer_is_like_all_later_ones(llm):
    assert llm.engine.core.reset_prefix_cache()
    ids = (llm.tokenizer.encode(STORY) * 10)[:40]
    outputs = [llm.generate([ids], greedy(logprobs=1))[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]
    first = outputs[0].outputs[0]
    for output in outputs[1:]:
        again = output.outputs[0]
        assert again.token_ids == first.token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in again.logprobs], [entry.logprob for entry in first.logprobs], atol=1e-4
        )


def test_a_length_is_no_reservation(llm):
    output = one(llm, [300] * (LENGTH - 10), greedy(max_tokens=60, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (10, "length")


def test_alternatives_are_never_missing(llm):
    (output,) = llm.generate([STORY], SamplingParams(n=4, logprobs=1, seed=7, temperature=1.2, max_tokens=40))
    for choice in output.outputs:
        assert len(choice.logprobs) == len(choice.token_ids) > 0
        for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
            assert entry.token_id == token_id
            assert len(entry.top) == 1
            assert entry.logprob <= entry.top[0][1] <= 0


# ---- what ends an answer --------------------------------------------------------------------------------------------


def test_min_tokens_and_ignore_eos_hold_against_a_bias(llm):
    end = eos(llm)
    bias = {end: 100}
    assert one(llm, STORY, greedy(logit_bias=bias)).token_ids == (end,)
    answer = one(llm, STORY, greedy(logit_bias=bias, min_tokens=4))
    assert len(answer.token_ids) == 5, "four, and the end"
    assert answer.token_ids[-1] == end
    assert end not in answer.token_ids[:4]
    assert answer.finish_reason == "stop"
    ignoring = one(llm, STORY, greedy(logit_bias=bias, min_tokens=10, ignore_eos=True))
    assert (ignoring.token_ids, ignoring.finish_reason) == ((end,) * 20, "length")


def test_every_end_of_the_model_is_meant(llm):
    """Whatever ids generation_config.json names, min_tokens forbids them all and ignore_eos goes on after them all."""
    ends = frozenset({eos(llm), 300})
    intake = Intake(dataclasses.replace(llm.engine.info, eos_token_ids=ends), tokenizer=llm.tokenizer)
    prompt, script = llm.tokenizer.encode(STORY), [301, 300, 302]

    def say(**values):
        (request,) = intake.requests("x", prompt, greedy(max_tokens=3, **values), forced_token_ids=script)
        outputs = run(llm, request)["x"]
        return tokens_of(outputs), outputs[-1].finish_reason

    assert say() == ([301, 300], FinishReason.STOP)
    assert say(ignore_eos=True) == ([301, 300, 302], FinishReason.LENGTH)
    (request,) = intake.requests("x", prompt, greedy(min_tokens=6, logit_bias=dict.fromkeys(ends, 90)))
    tokens = tokens_of(run(llm, request)["x"])
    assert len(tokens) == 7
    assert not ends & set(tokens[:6])


def test_stop_strings_wait_for_min_tokens(llm):
    free = one(llm, STORY, greedy(max_tokens=30))
    assert free.finish_reason == "length"
    letter = "e"
    stopped = one(llm, STORY, greedy(max_tokens=30, stop=[letter], min_tokens=8))
    assert len(stopped.token_ids) > 8
    assert free.text.startswith(stopped.text)
    assert letter in stopped.text
    assert stopped.stop_reason == letter
    assert len(one(llm, STORY, greedy(max_tokens=30, stop=[letter])).token_ids) < 8


def test_the_models_defaults_hold_unless_something_is_sent(llm):
    """Penalties among them; what is sent wins, None is nothing sent."""
    defaults = {"repetition_penalty": 3.0, "presence_penalty": 1.5, "stop_token_ids": (301,)}
    intake = Intake(dataclasses.replace(llm.engine.info, default_params=defaults), tokenizer=llm.tokenizer)
    sent = {"temperature": 0, "max_tokens": 25, "ignore_eos": True}

    def answer(**values):
        return one(llm, STORY, intake.params(**sent, **values)).token_ids

    explicit = one(llm, STORY, SamplingParams(**sent, **defaults)).token_ids
    plain = one(llm, STORY, SamplingParams(**sent)).token_ids
    assert answer() == answer(repetition_penalty=None, presence_penalty=None) == explicit != plain
    assert answer(repetition_penalty=1, presence_penalty=0, stop_token_ids=[]) == plain


# ---- what may be said -----------------------------------------------------------------------------------------------


def test_only_allowed_ids_are_said(llm):
    allowed = list(range(270, 290))
    answer = one(llm, STORY, SamplingParams(allowed_token_ids=allowed, temperature=2.0, seed=1, max_tokens=40))
    assert set(answer.token_ids) <= set(allowed)
    assert len(set(answer.token_ids)) > 3


def test_bad_words_are_not_said(llm):
    whole = one(llm, STORY, greedy(max_tokens=40))
    words = whole.text.split(" ")
    words = [" ".join(words[1:3]), *words[3:6]]
    polite = one(llm, STORY, greedy(max_tokens=40, bad_words=words))
    sequences = [llm.tokenizer.encode(text, add_special_tokens=False) for word in words for text in (word, f" {word}")]
    for sequence in sequences:
        said = list(polite.token_ids)
        assert not any(said[at : at + len(sequence)] == sequence for at in range(len(said)))
    assert polite.text != whole.text


def test_a_request_that_forbids_everything_fails_alone(llm):
    ids = llm.tokenizer.encode("x", add_special_tokens=False)
    assert len(ids) == 1
    mute = greedy(allowed_token_ids=ids, bad_words=["x"])
    broken, fine = llm.generate([STORY, STORY], [mute, greedy()])
    assert broken.outputs[0].finish_reason == "error"
    assert "no token was allowed" in broken.outputs[0].error
    assert fine.outputs[0].token_ids == one(llm, STORY, greedy()).token_ids


def test_answers_may_be_made_to_fit_a_form(llm):
    params = SamplingParams(n=2, temperature=1.5, seed=5, max_tokens=60)
    forms = [{"regex": "[a-c]{4}-[0-9]{3}"}, None, {"choice": ["yes indeed", "no"]}]
    first, free, second = llm.generate([STORY] * 3, params, structured_outputs=forms)
    for choice in first.outputs:
        assert len(choice.text) == 8
        assert set(choice.text[:4]) <= set("abc")
        assert choice.text[4] == "-"
        assert choice.text[5:].isdigit()
        assert choice.finish_reason == "stop"
    assert {choice.text for choice in second.outputs} <= {"yes indeed", "no"}
    assert free.outputs == llm.generate([STORY], params)[0].outputs
    for bad in ({"regex": "("}, {"regex": "a", "choice": ["b"]}, {"pattern": "a"}):
        with pytest.raises(InvalidRequest) as caught:
            llm.generate([STORY], params, structured_outputs=bad)
        assert caught.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="2 structured_outputs for 1 prompts"):
        llm.generate([STORY], params, structured_outputs=[None, None])


def test_priorities_offline(llm):
    order = []
    finish = llm.engine.core.scheduler._finish
    llm.engine.core.scheduler._finish = lambda sequence, reason: (
        order.append(sequence.number),
        finish(sequence, reason),
    )
    try:
        llm.generate(
            [[300 + i] * 60 for i in range(5)], greedy(max_tokens=3, ignore_eos=True), priority=[3, 2, 1, 0, -1]
        )
    finally:
        del llm.engine.core.scheduler._finish
    assert order == sorted(order, reverse=True)
    with pytest.raises(InvalidRequest, match="1 priorities for 2 prompts"):
        llm.generate(["a", "b"], greedy(), priority=[1])


# ---- log-probabilities of prompts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 1])
def test_log_probabilities_of_a_prompt_are_those_of_saying_it(llm, count):
    """Cold and warm, in chunks and whole. The reference makes the model say the prompt, token by token."""
    ids = (llm.tokenizer.encode(" ".join(PROMPTS)) * 3)[:count]
    asked = greedy(max_tokens=2, prompt_logprobs=4)
    assert llm.engine.core.reset_prefix_cache()
    cold, warm = (llm.generate([ids], asked)[0] for _ in range(2))
    beside = llm.generate([ids, STORY], [asked, greedy(max_tokens=9)])[0]
    assert cold.num_cached_tokens == warm.num_cached_tokens == 0
    (said,) = llm.engine.intake.requests(
        "said", ids[:1], greedy(max_tokens=count - 1, logprobs=4, ignore_eos=True), forced_token_ids=ids[1:]
    )
    expected = [entry for output in run(llm, said)["said"] for entry in output.logprobs]
    assert [entry.token_id for entry in expected] == ids[1:]
    for output in (cold, warm, beside):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == count
        for given, reference in zip(output.prompt_logprobs[1:], expected, strict=True):
            assert given.token_id == reference.token_id
            assert math.isclose(given.logprob, reference.logprob, abs_tol=2e-4)
            np.testing.assert_allclose([x for _, x in given.top], [x for _, x in reference.top], atol=2e-4)
    assert llm.generate([ids], greedy(max_tokens=2))[0].prompt_logprobs is None
    if count > PAGE:
        assert llm.generate([ids], greedy(max_tokens=2))[0].num_cached_tokens > 0, "others may read what they left"
