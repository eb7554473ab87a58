"""Sampling options through whole engines: the device's state survives chunks, preemptions, other users of a slot and several devices.

Expected answers come from the model's logits of whole sequences and the definitions of `sampling_reference`.
"""

import dataclasses
import functools

import numpy as np
import pytest
from cases import FIXTURES
from golden_models import backend_for, forward, load_fixture
from sampling_reference import edited_by_definition, mask_of

from tpu_serve import LLM
from tpu_serve.request import Bias, FinishReason, Request, SamplingParams
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import Scheduled

NAME, VOCABULARY, NUM_VALID, COUNT = "qwen3_moe", 512, 457, 14
# A budget below the prompts and fewer pages than the answers need together: chunks and preemptions are part of every run.
OPTIONS = {
    "dtype": "float32", "max_num_seqs": 4, "page_size": 8, "max_model_len": 96, "token_buckets": (16,),
    "max_num_batched_tokens": 16, "num_pages": 14, "enable_prefix_caching": False,
}  # fmt: skip


class Allowing:
    """A constraint that allows ids by a rule of the number of tokens so far."""

    is_finished = False

    def __init__(self, rule, follows=True, place=0, size=VOCABULARY):
        self.rule, self.follows, self.place, self.size = rule, follows, place, size

    @property
    def mask(self):
        return mask_of([token_id for token_id in range(self.size) if self.rule(token_id, self.place)], self.size)

    def accept(self, token_id):
        assert self.rule(token_id, self.place)
        self.place += self.follows

    def copy(self):
        return Allowing(self.rule, self.follows, self.place, self.size)


def ask(name, length, **values):
    """A greedy request for COUNT tokens."""
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | values.pop("params", {})
    prompt = tuple(np.random.default_rng(length).integers(0, NUM_VALID, length).tolist())
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**params), **values)


def all_requests():
    return [
        ask("plain", 30),
        ask("repetition", 21, params={"repetition_penalty": 1.8}),
        ask("presence", 20, params={"presence_penalty": 2.0, "frequency_penalty": 0.5}, biases=(Bias(50, 9.0),)),
        ask("biased", 19, biases=(*(Bias(token_id, -np.inf, until=5) for token_id in range(200)), Bias(300, 2.0))),
        ask("even", 18, constraint=Allowing(lambda token_id, place: token_id % 2 == 0, follows=False)),
        ask("turns", 17, constraint=Allowing(lambda token_id, place: token_id % 3 == place % 3)),
        ask("rewards", 22, params={"frequency_penalty": -1.0}, biases=(Bias(60, 6.0),)),
        ask("script", 9, forced_token_ids=tuple(range(40, 40 + COUNT)), params={"presence_penalty": 1.0}),
        ask(
            "everything", 12, biases=(Bias(7, 9.0),), params={"repetition_penalty": 1.3, "frequency_penalty": 1.0},
            constraint=Allowing(lambda token_id, place: token_id % 2 == place % 2),
        ),
    ]  # fmt: skip


def answer(request):
    """By definition, one whole sequence at a time."""
    model, params, _ = loaded()
    row = Scheduled(Sequence(request, 96), 0, 1, samples=True)
    tokens, constraint = row.sequence.tokens, row.sequence.constraint
    for step in range(COUNT):
        if request.forced_token_ids:
            tokens.append(request.forced_token_ids[step])
            continue
        _, logits = forward(model, params, tokens, backend_for(model, "dense"))
        tokens.append(int(edited_by_definition(np.asarray(logits[-1]), row, constraint, NUM_VALID).argmax()))
        if constraint is not None:
            constraint.accept(tokens[-1])
    return tokens[len(request.prompt_token_ids) :]


loaded = functools.cache(lambda: load_fixture(NAME))


@functools.cache
def expected():
    """{request id: its answer}"""
    return {request.id: answer(request) for request in all_requests()}


def run(core, requests):
    """{request id: its outputs} once all of them have ended."""
    outputs = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    core.scheduler.check()
    return outputs


def texts(outputs):
    return {name: [token_id for one in found for token_id in one.token_ids] for name, found in outputs.items()}


@pytest.fixture(scope="module", params=["model=1", "model=2", "data=2"])
def engine(request):
    return LLM(str(FIXTURES / NAME), mesh=request.param, **OPTIONS).engine


def test_every_option_with_strangers_and_preemptions(engine):
    core, answers = engine.core, expected()
    programs, preemptions = core.runner.compile_count, core.scheduler.stats.num_preemptions
    for requests in (all_requests(), all_requests()[::-1]):  # the second time every slot has had another user
        assert texts(run(core, requests)) == answers
    assert core.scheduler.stats.num_preemptions > preemptions
    assert core.runner.compile_count == programs


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("repetition", "params"),
        ("presence", "params"),
        ("biased", "biases"),
        ("even", "constraint"),
        ("turns", "constraint"),
        ("rewards", "params"),
        ("script", "forced_token_ids"),
        *(("everything", field) for field in ("params", "biases", "constraint")),
    ],
)
def test_options_change_something(name, without):
    """Or the test above would pass without them."""
    (request,) = (one for one in all_requests() if one.id == name)
    plain = dataclasses.replace(request, **{without: getattr(ask("plain", 1), without)})
    assert answer(plain) != expected()[name]


def test_a_random_answer_is_the_same_in_any_company(engine):
    hot = {"temperature": 1.5, "top_p": 0.9, "top_k": 40, "max_tokens": COUNT, "ignore_eos": True}
    requests = [
        dataclasses.replace(one, id=f"hot {one.id}", seed=index, params=dataclasses.replace(one.params, **hot))
        for index, one in enumerate(all_requests())
    ]
    alone = {name: found for one in requests for name, found in texts(run(engine.core, [one])).items()}
    assert texts(run(engine.core, [*all_requests(), *requests[::-1]])) == expected() | alone


def test_a_request_without_any_token_ends_alone(engine):
    nothing = ask("nothing", 5, constraint=Allowing(lambda token_id, place: False, follows=False))
    outputs = run(engine.core, [all_requests()[0], nothing, all_requests()[1]])
    (only,) = outputs.pop("nothing")
    assert (only.finish_reason, only.token_ids) == (FinishReason.ERROR, ())
    assert "no token was allowed" in only.error
    assert texts(outputs) == {name: expected()[name] for name in outputs}


def test_log_probabilities_of_prompts(engine):
    """Chunks, a preemption, batch-mates: an entry for each token but the first, of the model's own distribution."""
    model, params, _ = loaded()
    requests = [
        ask(name, length, params={"prompt_logprobs": count})
        for name, length, count in (("a", 40, 3), ("b", 16, 0), ("c", 17, 20), ("d", 1, 2), ("e", 30, 1))
    ]
    before = engine.core.runner.compile_count
    outputs = run(engine.core, [*requests, *all_requests()[1:3]])
    assert engine.core.runner.compile_count == before
    for request in requests:
        first, *others = outputs[request.id]
        assert all(one.prompt_logprobs is None for one in others)
        nothing, *entries = first.prompt_logprobs
        assert nothing is None
        prompt, count = request.prompt_token_ids, request.params.prompt_logprobs
        assert [entry.token_id for entry in entries] == list(prompt[1:])
        logits = np.asarray(forward(model, params, prompt, backend_for(model, "dense"))[1], np.float64)
        values = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for place, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(values[place, entry.token_id], abs=1e-3)
            assert len(entry.top) == count
            assert [value for _, value in entry.top] == pytest.approx(-np.sort(-values[place])[:count], abs=1e-3)
            assert all(value == pytest.approx(values[place, one], abs=1e-3) for one, value in entry.top)
