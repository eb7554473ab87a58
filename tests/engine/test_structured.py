"""Constraints on a real engine whose weights are random, so that nothing but the mask gives its answers a form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tpu_serve import LLM, InvalidRequest, SamplingParams

FOLDER = Path(__file__).parents[1] / "fixtures" / "qwen3"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "mood": {"enum": ["good", "bad"]},
    },
    "required": ["name", "size", "mood"],
    "additionalProperties": False,
}
FORM = {"json": SCHEMA}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Fewer pages than the answers need together."""
    return LLM(
        str(FOLDER), dtype="float32", page_size=4, max_model_len=128, max_num_seqs=8, token_buckets=(32,), max_num_batched_tokens=32, num_pages=40
    )  # fmt: skip


def hot(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 100, **options})


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "size", "mood"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and type(value["size"]) is int
        and 0 <= value["size"] <= 99
        and value["mood"] in ("good", "bad")
    )


def test_answers_are_valid_and_end_by_themselves(llm: LLM) -> None:
    stats, runner = llm.engine.core.scheduler.stats, llm.engine.core.runner
    programs, preemptions = runner.compile_count, stats.num_preemptions
    outputs = llm.generate(
        [[1, 2, 3 + seed] for seed in range(8)], [hot(seed) for seed in range(8)], structured_outputs=FORM
    )
    ended = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(ended) >= 5, "blanks may fill an answer, but not most of them"
    assert all(is_valid(answer.text) for answer in ended)
    assert len({answer.text for answer in ended}) == len(ended)
    assert stats.num_preemptions > preemptions, "this must hold for recomputed sequences too"
    assert runner.compile_count == programs
    llm.engine.core.scheduler.check()


def test_preemption_and_company_change_nothing(llm: LLM) -> None:
    prompts = [[5, 6, 7 + seed] for seed in range(8)]
    together = llm.generate(prompts, [hot(seed) for seed in range(8)], structured_outputs=FORM)
    for index in (0, 7):
        (alone,) = llm.generate([prompts[index]], hot(index), structured_outputs=FORM)
        assert alone.outputs[0].token_ids == together[index].outputs[0].token_ids


def test_batch_mates_are_free(llm: LLM) -> None:
    prompts = [[9, 8, 7 + seed] for seed in range(6)]
    params = [hot(seed, max_tokens=24) for seed in range(6)]
    free = llm.generate(prompts, params)
    forms = [FORM, None, {"regex": "[0-9]{3}"}, None, {"choice": ["yes", "no"]}, None]
    mixed = llm.generate(prompts, params, structured_outputs=forms)
    for index in (1, 3, 5):
        assert mixed[index].outputs[0].token_ids == free[index].outputs[0].token_ids
    assert re.fullmatch("[0-9]{3}", mixed[2].outputs[0].text)
    assert mixed[4].outputs[0].text in ("yes", "no")
    assert mixed[2].outputs[0].finish_reason == mixed[4].outputs[0].finish_reason == "stop"


def test_choices_have_copies_of_their_own(llm: LLM) -> None:
    (output,) = llm.generate([[1, 2]], hot(1, n=4), structured_outputs={"regex": "[a-z]{6}"})
    texts = [choice.text for choice in output.outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)
    assert len(set(texts)) == 4


def test_greedy_answers_are_the_likeliest_that_are_allowed(llm: LLM) -> None:
    params = hot(0, temperature=0)
    (first,) = llm.generate([[3, 4, 5]], params, structured_outputs={"choice": ["alpha", "beta", "gamma"]})
    (again,) = llm.generate([[3, 4, 5]], params, structured_outputs={"choice": ["gamma", "beta", "alpha"]})
    assert first.outputs[0].text == again.outputs[0].text in ("alpha", "beta", "gamma")


def test_with_other_limits(llm: LLM) -> None:
    """A form, words that are forbidden and a least length at once."""
    params = [hot(seed, bad_words=["b"], min_tokens=3) for seed in range(4)]
    for output in llm.generate([[4, seed] for seed in range(4)], params, structured_outputs={"regex": "[abc]+"}):
        answer = output.outputs[0]
        assert re.fullmatch("[abc]+", answer.text)
        assert len(answer.token_ids) >= 3
        assert "b" not in [llm.tokenizer.token_text(token_id) for token_id in answer.token_ids]


def test_an_answer_that_max_tokens_cuts(llm: LLM) -> None:
    (output,) = llm.generate([[4, 4]], hot(2, max_tokens=5), structured_outputs=FORM)
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text.startswith("{")
    with pytest.raises(InvalidRequest, match="unclosed group"):
        llm.generate([[4, 4]], structured_outputs={"regex": "("})
