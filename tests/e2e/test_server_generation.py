"""What the sampling fields of a request become: engine parameters, constraints, scripts, priorities; and the pace of a stream."""

import json
from typing import Any

import pytest
from fakes import END, VOCAB_SIZE, FakeRunner, Served, asynchronous, saying, serving
from test_server_answers import check_both_modes, join
from test_server_errors import CHAT, COMPLETIONS, USER, check_error

from tpu_serve.config import ServerConfig
from tpu_serve.request import NOTHING_ALLOWED_ID, Request, SamplingParams

SCRIPTED = ServerConfig(enable_scripted_output=True)


class Recorder:
    """A script that ends at once, and the requests that it was asked for."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}

    def __call__(self, request: Request, index: int) -> int:
        self.requests[request.id] = request
        return END

    async def params(self, served: Served, **fields: Any) -> SamplingParams:
        """What both endpoints make of some fields, which must be the same but for the length."""
        seen = []
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
            self.requests.clear()
            response = await served.post(path, {**body, "max_tokens": 9, **fields})
            assert response.status_code == 200, response.text
            assert "x-tpu-serve-ignored" not in response.headers
            seen.append(next(iter(self.requests.values())).params)
        assert seen[0] == seen[1]
        return seen[0]


@asynchronous
async def test_every_field_reaches_the_engine():
    recorder = Recorder()
    async with serving(runner=FakeRunner(script=recorder)) as served:
        neutral = await recorder.params(served)
        given = {
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "seed": 4,
            "stop": ["x"],
            "stop_token_ids": [5],
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "presence_penalty": -1,
            "frequency_penalty": 1.5,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "bad_words": ["yes"],
            "allowed_token_ids": [END, 97],
            "prompt_logprobs": 3,
        }
        seen = await recorder.params(served, **given)
        for name, value in given.items():
            expected = tuple(value) if isinstance(value, list) else value
            assert getattr(seen, name) == expected != getattr(neutral, name), name
        seen = await recorder.params(served, logit_bias={"0": 1, str(VOCAB_SIZE - 1): -100})
        assert seen.logit_bias == ((0, 1.0), (VOCAB_SIZE - 1, -100.0))
        nothing = dict.fromkeys([*given, "logit_bias", "priority", "structured_outputs", "scripted_token_ids"])
        assert await recorder.params(served, **nothing) == neutral
        for both in (True, False):
            assert await recorder.params(served, spaces_between_special_tokens=both) == neutral


@asynchronous
async def test_the_models_own_defaults_give_way_to_a_request_and_not_to_null():
    recorder = Recorder()
    defaults = {"presence_penalty": 1.5, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": (7,)}
    async with serving(runner=FakeRunner(script=recorder), **defaults) as served:
        for fields in ({}, dict.fromkeys(defaults)):
            seen = await recorder.params(served, **fields)
            assert {name: getattr(seen, name) for name in defaults} == defaults
        seen = await recorder.params(served, presence_penalty=0, repetition_penalty=1, min_tokens=0, stop_token_ids=[])
        assert not seen.has_penalties
        assert (seen.min_tokens, seen.stop_token_ids) == (0, ())


@asynchronous
async def test_priorities():
    recorder = Recorder()
    async with serving(runner=FakeRunner(script=recorder), scheduling_policy="priority") as served:
        for path, body in ((COMPLETIONS, {"prompt": ["hi", "ho"]}), (CHAT, {"messages": [USER]})):
            recorder.requests.clear()
            for priority in (-(2**63), -1, 0, 7, 2**63 - 1):
                response = await served.post(path, {**body, "priority": priority})
                assert response.status_code == 200, response.text
                assert {request.priority for request in recorder.requests.values()} == {priority}
                recorder.requests.clear()
            response = await served.post(path, {**body, "priority": 2**63})
            check_error(response, 400, "priority", "invalid_value")


_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "[n]",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "[/n]",
    },
}
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "na"),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, "123", "12a"),
    ({"structured_outputs": {"json": {"type": "integer"}}}, "12", "a"),
    ({"structured_outputs": {"json": '{"type": "integer"}', "regex": None}}, "12", "a"),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a", "c"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, '{"a":1}', "[1]"),
    ({"structured_outputs": {"structural_tag": _TAG}}, "[n]1[/n]", "[n]a"),
    ({"structured_outputs": {"structural_tag": json.dumps(_TAG)}}, "[n]1[/n]", "[n]a"),
    ({"response_format": _TAG}, "[n]1[/n]", "[n]a"),
    ({"response_format": {"type": "json_object"}}, '{"a":1}', "1"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"const": 5}, "strict": True},
            }
        },
        "5",
        "6",
    ),
    ({"response_format": {"type": "text"}, "structured_outputs": {"choice": ["x"]}}, "x", "y"),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS)
@asynchronous
async def test_an_answer_has_the_form_that_was_asked_for(fields: dict[str, Any], good: str, bad: str):
    """The script stands for a model; what the form forbids, a real one cannot sample, and here it ends the request."""
    async with serving(SCRIPTED) as served:
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
            base = {**body, **fields, "max_tokens": 20}
            served.runner.script = saying(good)
            response = await served.post(path, {**base, "n": 2})
            assert response.status_code == 200, response.text
            for choice in response.json()["choices"]:
                assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == good
                assert choice["finish_reason"] == "stop"
            served.runner.script = saying(bad)
            check_error(await served.post(path, base), 500, None, "request_failed")
            response = await served.post(path, {**base, "scripted_token_ids": list(bad.encode())})
            assert response.status_code == 200, "a script is stronger than a form"
        await served.idle()


@asynchronous
async def test_free_text_and_several_prompts_with_a_form():
    async with serving(runner=FakeRunner(script=saying("ab"))) as served:
        for fields in ({"response_format": {"type": "text"}}, {"response_format": {"type": "text", "x": 1}}, {}):
            assert (await served.complete(**fields))["choices"][0]["text"] == "ab"
        answer = await served.complete(prompt=["a", "b", "c"], n=2, structured_outputs={"regex": "a[b-z]"})
        assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 6


@pytest.mark.parametrize("num_decode_steps", [1, 3])
@asynchronous
async def test_scripted_output(num_decode_steps: int):
    async with serving(SCRIPTED, num_decode_steps=num_decode_steps) as served:
        choices = await check_both_modes(served, scripted_token_ids=list("é!".encode()), n=2)
        assert [choice["text"] for choice in choices.values()] == ["é!"] * 2
        choices = await check_both_modes(served, scripted_token_ids=list(b"abc"), max_tokens=2)
        assert choices[0]["finish_reason"] == "length"
        await check_both_modes(served, scripted_token_ids=list("abcdé😀!".encode()), n=2, stop="d")
        for script, reason in (([], "invalid_value"), ([VOCAB_SIZE], "out_of_vocabulary"), ([-1], "out_of_vocabulary")):
            response = await served.post(COMPLETIONS, {"prompt": "hi", "scripted_token_ids": script})
            check_error(response, 400, "scripted_token_ids", reason)
    async with serving() as served:
        response = await served.post(COMPLETIONS, {"prompt": "hi", "scripted_token_ids": [97]})
        message = check_error(response, 400, "scripted_token_ids", "unsupported_parameter")
        assert "--enable-scripted-output" in message


@pytest.mark.parametrize("interval", [1, 2, 3, 100])
@asynchronous
async def test_stream_interval(interval: int):
    config = ServerConfig(enable_scripted_output=True, stream_interval=interval)
    async with serving(config) as served:
        script = list("abcdé😀!".encode())
        await check_both_modes(served, scripted_token_ids=script)
        await check_both_modes(served, scripted_token_ids=script, n=2, stop="d")
        chunks = await served.events(COMPLETIONS, prompt="hi", scripted_token_ids=script, return_token_ids=True)
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sizes[0] == 1, "the first token waits for nothing"
        assert all(size >= interval for size in sizes[1:-1])
        # Fewer where the model was faster than the server: what is there goes out together.
        assert 2 <= len(chunks) <= {1: 8, 2: 6, 3: 5, 100: 2}[interval]
        assert sum(sizes) == len(script) + 1, "the last token ends it"


@asynchronous
async def test_usage_can_be_forced_on_streams():
    async with serving(ServerConfig(enable_force_include_usage=True)) as served:
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
            for options in (None, {"include_usage": False}, {"continuous_usage_stats": True}):
                chunks = await served.events(path, **body, max_tokens=2, stream_options=options)
                assert chunks[-1]["choices"] == []
                assert chunks[-1]["usage"]["completion_tokens"] == 2
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                assert counts == sorted(counts), "every chunk says how many tokens there were so far"
                assert counts[-2:] == [2, 2]


@asynchronous
async def test_answers_say_where_their_time_went():
    async with serving(runner=FakeRunner(seconds=0.02)) as served:
        for answer in (await served.complete(max_tokens=3), await served.chat(max_tokens=3)):
            assert 0 <= answer["metrics"]["queue_ms"] <= answer["metrics"]["ttft_ms"] < 5000
            assert answer["metrics"]["ttft_ms"] >= 20
        usage = {"include_usage": True}
        for path, body in ((COMPLETIONS, {"prompt": ["hi", "ho"]}), (CHAT, {"messages": [USER]})):
            chunks = await served.events(path, **body, max_tokens=2, stream_options=usage)
            assert chunks[-1]["metrics"]["ttft_ms"] >= 20
            assert all("metrics" not in chunk for chunk in chunks[:-1])
        assert join(chunks)[0]["finish_reason"] == "length"


@asynchronous
async def test_fields_that_leave_nothing_to_say_are_the_callers_mistake():
    async with serving(runner=FakeRunner(script=lambda request, index: NOTHING_ALLOWED_ID)) as served:
        body = {"prompt": "hi", "allowed_token_ids": [97], "logit_bias": {"97": -100}}
        check_error(await served.post(COMPLETIONS, body), 400, None, "nothing_allowed")
        (event,) = await served.events(COMPLETIONS, **body)
        assert event["error"]["reason"] == "nothing_allowed"
        await served.idle()
