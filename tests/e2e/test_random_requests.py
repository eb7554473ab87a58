"""Requests made of many fields at random: those that are right say the same in both modes, those that are wrong are refused by name."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from bug_cases import CHAT, COMPLETIONS, HYBRID, TOOLS, USER
from chat_modes import joined, nameless, plain
from fakes import VOCAB_SIZE, Served, serving
from hypothesis import HealthCheck
from hypothesis import strategies as st
from test_server_answers import flat, join
from test_server_errors import BAD_CHATS, BAD_COMPLETIONS, BAD_VALUES

from tpu_serve.config import ServerConfig
from tpu_serve.server.protocol import ChatCompletionRequest, CompletionRequest
from tpu_serve.server.responses_protocol import ResponseRequest

RESPONSES = "/v1/responses"
FIELDS = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest, RESPONSES: ResponseRequest}
NUM_RIGHT, NUM_WRONG, NUM_STRANGE = 200, 200, 150
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"id": 42}}\n</tool_call>',
    '<think>hm</think>\n\n<tool_call>\n{"name": "f", "arguments": {"id": "é😀"}}\n</tool_call>',
    'I look.\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "f", "arg',
    "no call <tool_call> at all",
)
TEXTS = (
    "plain",
    "é😀x",
    "<think>hm</think>\n\nyes",
    "<think>never ends",
    "a\u2028b\r\nc </think> <tool_call> d",
    *CALLS,
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMMON: dict[str, list[Any]] = {
    "max_tokens": [1, 5, 30, 200],
    "n": [1, 2, 3],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0, 0.5],
    "seed": [None, -1, 7],
    "stop": ["a", ["zz", "x", "</think>"], ["<tool"]],
    "stop_token_ids": [[], [ord("e")]],
    "min_tokens": [0, 1],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "presence_penalty": [1.5],
    "frequency_penalty": [-2],
    "repetition_penalty": [0.5],
    "logit_bias": [{}, {"5": -100}],
    "bad_words": [["never", " said"]],
    "allowed_token_ids": [[97, 98]],
    "structured_outputs": [{"regex": "[a-z]+"}, {"choice": ["a", "b"]}, {"json": SCHEMA}],
    "truncate_prompt_tokens": [1, -1],
    "cache_salt": ["salt"],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "user": ["somebody"],
}
OF_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["hi", ["a", "é😀", "b"], [1, 2, 3], [[104], [105, 106]]],
    "echo": [True],
    "logprobs": [0, 3],
    "add_special_tokens": [False],
}
OF_CHATS: dict[str, list[Any]] = {
    "messages": [USER, [{"role": "system", "content": ""}, *USER], [*USER, {"role": "assistant", "content": "OK! "}]],
    "echo": [True],
    "logprobs": [True],
    "parallel_tool_calls": [False],
    "include_reasoning": [False],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "reasoning_effort": ["low", "none"],
    "continue_final_message": [True],
    "max_completion_tokens": [3, 100],
    "thinking_token_budget": [-1, 2],
}


@st.composite
def right(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body that must be answered."""
    kind = draw(st.sampled_from(["completion", "chat", "tools"]))
    path, own, base = (
        (COMPLETIONS, OF_COMPLETIONS, {"prompt": "hi"})
        if kind == "completion"
        else (CHAT, OF_CHATS, {"messages": USER})
    )
    fields = {**COMMON, **own}
    names = draw(st.sets(st.sampled_from(sorted(fields)), max_size=5 if kind == "tools" else 9))
    texts = st.sampled_from(CALLS if kind == "tools" else TEXTS).map(lambda text: list(text.encode()))
    ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=25)
    body = {
        **base,
        "scripted_token_ids": draw(texts if kind == "tools" else texts | ids),
        **{name: draw(st.sampled_from(fields[name])) for name in sorted(names)},
    }
    if kind == "tools":
        named = {"type": "function", "function": {"name": "f"}}
        body |= {"tools": TOOLS, "tool_choice": draw(st.sampled_from(["auto", "none", "required", named]))}
    if body.get("continue_final_message"):
        body["messages"] = OF_CHATS["messages"][-1]
    return path, body


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


class Shared:
    """A server and the event loop that it lives in."""

    def __init__(self, served: Served, runner: asyncio.Runner):
        self.served = served
        self._runner = runner

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        response = self._runner.run(asyncio.wait_for(self.served.post(path, body), 10))
        assert len(response.content) < 200_000
        return response.status_code, response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return self._runner.run(asyncio.wait_for(self.served.events(path, **body), 10))

    def check(self) -> None:
        """Nothing is left, and others are answered."""
        self._runner.run(self.served.idle())
        status, answer = self.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    config = ServerConfig(enable_scripted_output=True, reasoning_parser="qwen3", tool_call_parser="hermes")
    with asyncio.Runner() as runner:
        context = serving(config, template=HYBRID, specials=("<think>", "</think>"))
        served = runner.run(context.__aenter__())
        yield Shared(served, runner)
        runner.run(context.__aexit__(None, None, None))


def settings(count: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def test_whatever_is_asked_for_a_stream_says_what_a_whole_answer_says(shared: Shared):
    reasons: Counter[str] = Counter()

    @settings(NUM_RIGHT)
    @hypothesis.given(right())
    def run(made: tuple[str, dict[str, Any]]) -> None:
        path, body = made
        status, whole = shared.post(path, body)
        assert status == 200, whole
        chunks = shared.events(path, {**body, "stream_options": {"include_usage": True}})
        if path == CHAT:
            shown = [choice | {"token_ids": choice.get("token_ids") or []} for choice in whole["choices"]]
            assert {index: nameless(choice) for index, choice in joined(chunks).items()} == {
                choice["index"]: nameless(plain(choice)) for choice in shown
            }
            entries: dict[int, list[Any]] = {choice["index"]: [] for choice in shown}
            for chunk in chunks:
                for part in chunk["choices"]:
                    entries[part["index"]] += (part["logprobs"] or {}).get("content", [])
            assert entries == {
                choice["index"]: (choice["logprobs"] or {}).get("content", []) for choice in whole["choices"]
            }
        else:
            shown = [choice | {"token_ids": choice.get("token_ids") or []} for choice in whole["choices"]]
            assert join(chunks) == {choice["index"]: flat(choice) for choice in shown}
        counts = ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details")
        assert [chunks[-1]["usage"].get(name) for name in counts] == [whole["usage"].get(name) for name in counts]
        for choice in whole["choices"]:
            reasons[choice["finish_reason"]] += 1
            assert choice["finish_reason"] != "tool_calls" or choice["message"]["tool_calls"]

    run()
    assert set(reasons) == {"stop", "length", "tool_calls"}
    assert min(reasons.values()) > 10
    shared.check()


def test_one_wrong_field_is_found_among_any_others(shared: Shared):
    @settings(NUM_WRONG)
    @hypothesis.given(right(), st.data())
    def run(made: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
        path, body = made
        cases = [*BAD_VALUES, *(BAD_COMPLETIONS if path == COMPLETIONS else BAD_CHATS)]
        wrong, param, _ = data.draw(st.sampled_from([case for case in cases if "scripted_token_ids" not in case[0]]))
        for name in ("n", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "truncate_prompt_tokens"):
            body.pop(name, None)  # with other values of these some of the wrong ones are right
        status, answer = shared.post(path, {**body, **wrong})
        assert status == 400, (wrong, answer)
        assert answer["error"]["param"] in (param, *body), answer
        assert answer["error"]["message"]

    run()
    shared.check()


def test_any_value_in_any_field_is_answered_or_refused(shared: Shared):
    statuses: Counter[int] = Counter()

    @settings(NUM_STRANGE)
    @hypothesis.given(right(), st.data())
    def run(made: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
        path, body = made
        if data.draw(st.integers(0, 2)) == 0:
            path, body = RESPONSES, {"input": "hi", "scripted_token_ids": body["scripted_token_ids"]}
        names = sorted(set(FIELDS[path].model_fields) - {"stream"})
        name = data.draw(st.sampled_from(names) | st.text(min_size=1, max_size=8))
        body = {**body, name: data.draw(VALUES)}
        status, answer = shared.post(path, body)
        statuses[status] += 1
        assert status in (200, 400, 404), answer
        if status != 200:
            assert len(json.dumps(answer)) < 20_000
            assert answer["error"]["message"]
            assert answer["error"]["reason"]

    run()
    assert statuses[200] > 10
    # Hypothesis also draws from the constants of what is imported, so the shares differ between runs.
    assert statuses[400] > NUM_STRANGE // 5
    shared.check()
