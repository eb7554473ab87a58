"""Completions over the embedded model: what is scored is what was said, however it is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tpu_serve.config import EngineConfig, ServerConfig
from tpu_serve.engine import build
from tpu_serve.server.completions import create_completion, stream_completion
from tpu_serve.server.service import Service

PROMPT = "Once upon a time, there was a little"


class Completions:
    """A service in an event loop of its own."""

    def __init__(self) -> None:
        engine = build.build_engine(
            EngineConfig.from_options(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, token_buckets=(64,))
        )
        self.loop = asyncio.new_event_loop()
        self.service = self.loop.run_until_complete(self._start(engine))

    @staticmethod
    async def _start(engine: Any) -> Service:
        return Service.start(engine, ServerConfig(enable_scripted_output=True), ("tiny",))

    def __call__(self, **fields: Any) -> list[dict[str, Any]]:
        """The choices, the same in a stream and whole."""
        body = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, **fields}
        reply = self.loop.run_until_complete(asyncio.wait_for(create_completion(body, self.service), 120))
        if body.get("prompt_logprobs") is None:
            text = [""] * len(reply["choices"])
            for chunk in self.loop.run_until_complete(asyncio.wait_for(self._stream({**body, "stream": True}), 120)):
                for choice in chunk["choices"]:
                    text[choice["index"]] += choice["text"]
            assert text == [choice["text"] for choice in reply["choices"]]
        return reply["choices"]

    async def _stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [chunk async for chunk in stream_completion(body, self.service)]


@pytest.fixture(scope="module")
def complete() -> Iterator[Completions]:
    completions = Completions()
    yield completions
    completions.service.close()
    completions.loop.close()


def test_an_echo_scores_an_answer_as_the_model_did_when_it_gave_it(complete: Completions):
    (said,) = complete(max_tokens=12, logprobs=3, stop=".", include_stop_str_in_output=True)
    assert said["text"].endswith(".")
    tokens = said["prompt_token_ids"] + said["token_ids"]
    num_prompt = len(said["prompt_token_ids"])
    for prompt in (tokens, PROMPT + said["text"]):
        for max_tokens in (0, 1):
            (echo,) = complete(prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=3)
            scored = echo["logprobs"]
            assert len(scored["tokens"]) == len(tokens) + max_tokens
            shown = [place for place, token in enumerate(scored["tokens"]) if token != "<|im_end|>"]  # which is no text
            assert "".join(scored["tokens"][place] for place in shown) == echo["text"]
            for place in shown:
                assert echo["text"].startswith(scored["tokens"][place], scored["text_offset"][place])
            assert scored["token_logprobs"][0] is None
            assert scored["top_logprobs"][0] is None
            answer = scored["token_logprobs"][num_prompt : len(tokens)]
            np.testing.assert_allclose(answer, said["logprobs"]["token_logprobs"], atol=1e-4)
            for mine, theirs in zip(
                scored["top_logprobs"][num_prompt:], said["logprobs"]["top_logprobs"], strict=False
            ):
                assert list(mine) == list(theirs)
            # A greedy answer is the most probable one at every place.
            tops = scored["top_logprobs"][num_prompt : len(tokens)]
            assert all(value == max(top.values()) for value, top in zip(answer, tops, strict=True))


def test_prompt_logprobs_say_what_an_echo_says(complete: Completions):
    (echo,) = complete(max_tokens=0, echo=True, logprobs=5)
    (choice,) = complete(max_tokens=1, prompt_logprobs=5)
    assert choice["prompt_logprobs"][0] is None
    token_ids = choice["prompt_token_ids"]
    for place in range(1, len(token_ids)):
        entries = choice["prompt_logprobs"][place]
        own = entries[str(token_ids[place])]
        assert own["logprob"] == pytest.approx(echo["logprobs"]["token_logprobs"][place], abs=1e-4)
        assert own["decoded_token"] == echo["logprobs"]["tokens"][place]
        ranked = {entry["rank"]: entry["logprob"] for entry in entries.values() if entry["rank"] is not None}
        assert sorted(ranked) == [1, 2, 3, 4, 5]
        assert [ranked[rank] for rank in range(1, 6)] == sorted(ranked.values(), reverse=True)
        assert len(entries) == (5 if own["rank"] is not None else 6)


def test_scripts_are_followed_and_scored(complete: Completions):
    (said,) = complete(max_tokens=8, logprobs=0, ignore_eos=True)
    (scripted,) = complete(max_tokens=8, logprobs=0, ignore_eos=True, scripted_token_ids=said["token_ids"])
    assert scripted["token_ids"] == said["token_ids"]
    np.testing.assert_allclose(scripted["logprobs"]["token_logprobs"], said["logprobs"]["token_logprobs"], atol=1e-4)
    script = complete.service.tokenizer.encode(" a red car", False)
    (scripted,) = complete(scripted_token_ids=script, logprobs=1)
    assert scripted["text"] == " a red car"
    assert scripted["finish_reason"] == "stop"
    (echo,) = complete(prompt=PROMPT + " a red car", max_tokens=0, echo=True, logprobs=1)
    np.testing.assert_allclose(
        echo["logprobs"]["token_logprobs"][-len(script) :],
        scripted["logprobs"]["token_logprobs"][: len(script)],
        atol=1e-4,
    )


def test_biases_penalties_and_forms_change_the_answer(complete: Completions):
    (free,) = complete(max_tokens=8)
    first = free["token_ids"][0]
    for fields in (
        {"logit_bias": {str(first): -100}},
        {"bad_words": [complete.service.tokenizer.token_text(first)]},
        {"structured_outputs": {"choice": ["xyz"]}},
    ):
        (other,) = complete(max_tokens=8, **fields)
        assert other["token_ids"][0] != first, fields
    assert {tuple(choice["token_ids"]) for choice in complete(max_tokens=4, logit_bias={str(first): 100}, n=2)} == {
        (first,) * 4
    }
    (allowed,) = complete(max_tokens=4, allowed_token_ids=[first])
    assert allowed["token_ids"] == [first] * 4
    for choice in complete(max_tokens=60, n=3, temperature=1, seed=5, response_format={"type": "json_object"}):
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)
        else:
            assert choice["text"].lstrip().startswith("{")
    (ended,) = complete(max_tokens=3, min_tokens=3, logit_bias={"2": 100})
    assert len(ended["token_ids"]) == 3
