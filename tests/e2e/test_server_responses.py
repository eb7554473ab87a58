"""/v1/responses: what is asked, what is answered, and how streams tell of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from fakes import FakeRunner, RawRequest, Served, asynchronous, letters, live_server, saying, serving
from response_modes import (
    LOGPROBS,
    OTHER,
    RESPONSES,
    TOOL,
    TOOLS,
    USER,
    ask,
    brief,
    check_schema,
    parse_named_events,
    rebuilt,
)
from test_server_errors import check_error

from tpu_serve.config import ServerConfig
from tpu_serve.engine.client import EngineDead
from tpu_serve.server.responses import create_response, stream_response

HERMES = ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3", enable_scripted_output=True)
THOUGHTS = ("<think>", "</think>")
"""Tokens of their own: it tells them from a forced call at the first one."""
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"id": 42}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
F, G, HM = ("f", '{"id": 42}'), ("g", "{}"), ("reasoning", "hm")

CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("It is 😀.", {}, [("message", "It is 😀.")]),
    ("", {}, [("message", "")]),
    (THOUGHT + "yes", {}, [HM, ("message", "yes")]),
    (THOUGHT, {}, [HM]),
    ("I look.\n" + CALL, TOOLS, [("message", "I look."), F]),
    (THOUGHT + CALL + "\n" + OTHER_CALL, TOOLS, [HM, F, G]),
    (CALL + "\n" + OTHER_CALL, {**TOOLS, "parallel_tool_calls": False}, [F]),
    (CALL, {**TOOLS, "tool_choice": "none"}, [("message", CALL)]),
    (CALL, {**TOOLS, "tool_choice": "required"}, [F]),
    (CALL, {**TOOLS, "tool_choice": {"type": "function", "name": "f"}}, [F]),
    (CALL, {"tools": [], "tool_choice": "auto"}, [("message", CALL)]),
    ("abcSTOPd", {"stop": "STOP"}, [("message", "abc")]),
    ("hello", {"max_output_tokens": 3}, [("message", "hel"), "incomplete"]),
    (THOUGHT + "yes", {"max_output_tokens": 9}, [("reasoning", "h"), "incomplete"]),
    (CALL, {**TOOLS, "max_output_tokens": 45}, [("f", '{"id":'), "incomplete"]),
    ("", {"scripted_token_ids": list(b"as told")}, [("message", "as told")]),
]


@pytest.mark.parametrize("interval", [1, 3])
@asynchronous
async def test_whole_responses_and_streams_say_the_same(interval: int):
    config = ServerConfig(
        tool_call_parser="hermes", reasoning_parser="qwen3", enable_scripted_output=True, stream_interval=interval
    )
    async with serving(config, specials=THOUGHTS) as served:
        for text, fields, expected in CASES:
            served.runner.script = saying(text)
            response = await ask(served, **fields)
            assert brief(response) == expected, text
            is_cut = expected[-1] == "incomplete"
            assert response["status"] == ("incomplete" if is_cut else "completed")
            assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
            assert (response["completed_at"] is None) == is_cut
            assert response["error"] is None


@asynchronous
async def test_events_come_in_the_order_of_openai():
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    expected = [
        *["created", "in_progress"],
        *item, *["reasoning_text.delta"] * 2, "reasoning_text.done", *done,
        *item, *["output_text.delta"] * 2, "output_text.done", *done,
        "output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    text = "<think>hm</think>ok" + OTHER_CALL
    async with serving(HERMES, runner=FakeRunner(script=saying(text))) as served:
        response = await served.post(RESPONSES, {"input": "hi", "stream": True, **TOOLS})
    assert [event["type"].removeprefix("response.") for event in parse_named_events(response.text)] == expected
    assert "[DONE]" not in response.text


@asynchronous
async def test_a_response_repeats_what_was_asked_and_counts_tokens():
    async with serving(HERMES, runner=FakeRunner(script=saying(THOUGHT + "yes")), temperature=0.5) as served:
        response = await ask(served)
        told = {
            "background": False,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 0.5,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "model": "tiny",
            "object": "response",
        }
        assert {name: response[name] for name in told} == told
        usage = response["usage"]
        assert usage["input_tokens"] == len("user\nhi" + "\n" + "assistant\n") + 3  # two starts of a turn and an end
        assert usage["output_tokens"] == len(THOUGHT) + len("yes") + 1
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": len(">\nhm\n</think>")}, (
            "from the end of its mark on"
        )
        assert usage["input_tokens_details"]["cached_tokens"] == 0
        again = (await served.post(RESPONSES, {"input": "hi"})).json()
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 16
        asked = {
            "instructions": "Be short.",
            "max_output_tokens": 50,
            "max_tool_calls": 3,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "summary": None},
            "temperature": 0,
            "text": {"format": {"type": "json_object"}},
            "tool_choice": {"type": "function", "name": "g"},
            "tools": [TOOL, OTHER],
            "top_p": 0.25,
            "truncation": "auto",
        }
        served.runner.script = saying(OTHER_CALL)
        response = await ask(served, **asked, store=True, user="me", request_id="mine")
        assert {name: response[name] for name in asked} == asked
        assert (response["id"], response["store"]) == ("resp_mine", False)


@asynchronous
async def test_the_text_may_have_a_form():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms = ({"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": schema, "strict": True})
    async with serving(ServerConfig(reasoning_parser="none"), runner=FakeRunner(script=saying('{"a":1}'))) as served:
        for form in forms:
            assert brief(await ask(served, text={"format": form})) == [("message", '{"a":1}')]
        served.runner.script = saying('{"b":1}')
        assert brief(await ask(served, text={"format": forms[0]})) == [("message", '{"b":1}')]
        response = await served.post(RESPONSES, {"input": "hi", "text": {"format": forms[1]}})
        assert response.status_code == 500, "the script breaks the form, and the server saw it"


@asynchronous
async def test_log_probabilities_are_those_of_the_text():
    async with serving(HERMES) as served:
        for text, fields, shown in (
            ("a é.", {}, "a é."),
            (THOUGHT + "yes", {}, "yes"),
            ("I look.\n" + CALL, TOOLS, "I look."),
            ("<think>t</think>t", {}, "t"),
            ("a <b<tool_", TOOLS, "a <b<tool_"),
            ("abcSTOP", {"stop": "STOP"}, "abc"),
        ):
            served.runner.script = saying(text)
            response = await ask(served, **LOGPROBS, top_logprobs=2, **fields)
            (part,) = next(item for item in response["output"] if item["type"] == "message")["content"]
            assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == shown
            assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [2] * len(shown.encode())
            assert {entry["logprob"] for entry in part["logprobs"]} == {-0.25}
        response = await ask(served, **LOGPROBS)
        assert response["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


@asynchronous
async def test_nothing_can_be_looked_up():
    async with serving() as served:
        known = (await served.post(RESPONSES, {"input": "hi", "max_output_tokens": 1, "store": True})).json()["id"]
        for method, path in (
            ("GET", f"/{known}"),
            ("DELETE", f"/{known}"),
            ("POST", f"/{known}/cancel"),
            ("GET", f"/{known}/input_items"),
        ):
            response = await served.client.request(method, RESPONSES + path)
            assert "not stored" in check_error(response, 404, None, "response_not_stored")
        assert (await served.client.get(RESPONSES)).status_code == 405


async def failing(served: Served) -> list[dict[str, Any]]:
    """The events of a stream whose engine dies under way."""
    request = RawRequest(served.app, RESPONSES, {"input": "hi", "stream": True})
    await request.until(lambda: "output_text.delta" in request.text)
    served.runner.failure = RuntimeError("secret")
    await asyncio.wait_for(request.task, 5)
    assert request.messages[0]["status"] == 200
    assert not request.messages[-1]["more_body"]
    assert "secret" not in request.text
    return parse_named_events(request.text)


@asynchronous
async def test_a_stream_tells_of_its_failure():
    async with serving(runner=FakeRunner(seconds=0.002)) as served:
        events = await failing(served)
        failed, error = events[-2:]
        for event in events:
            check_schema(event)
        assert [failed["type"], error["type"]] == ["response.failed", "error"]
        response = failed["response"]
        assert (response["status"], response["completed_at"]) == ("failed", None)
        assert response["error"] == {"code": "server_error", "message": error["message"]}
        assert error["error"]["reason"] == "engine_failed"
        assert error["error"]["message"] == error["message"]
        (item,) = response["output"]
        assert item["status"] == "incomplete"
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert item["content"][0]["text"] == "".join(deltas)
        with pytest.raises(AssertionError):
            rebuilt(events[2:-2])  # the item stays open
        assert (await served.post(RESPONSES, {"input": "hi"})).status_code == 503


@asynchronous
async def test_a_client_that_goes_away_ends_its_response():
    async with serving(runner=FakeRunner(seconds=0.002)) as served:
        for stream in (False, True):
            request = RawRequest(served.app, RESPONSES, {"input": "hi", "stream": stream})
            await request.until(lambda: served.engine.core.has_work)
            request.gone.set()
            await asyncio.wait_for(request.task, 5)
            await served.idle()


@asynchronous
async def test_the_same_without_http():
    async with serving(runner=FakeRunner(script=saying("ok"))) as served:
        service = served.state.service
        whole = await create_response({"input": "hi"}, service, "a")
        assert (whole["id"], brief(whole)) == ("resp_a", [("message", "ok")])
        events = [event async for event in stream_response({"input": "hi", "stream": True}, service, "b")]
        assert brief(events[-1]["response"]) == [("message", "ok")]
        served.runner.failure, kinds = RuntimeError("on fire"), []
        with pytest.raises(EngineDead):
            async for event in stream_response({"input": "hi"}, service):
                kinds.append(event["type"])
        assert kinds == ["response.created", "response.in_progress", "response.failed", "error"]


class Answer(pydantic.BaseModel):
    a: int


def test_the_openai_client():
    config = ServerConfig(port=0, tool_call_parser="hermes", reasoning_parser="qwen3")
    runner = FakeRunner(script=saying(THOUGHT + "I look.\n" + CALL))
    with live_server(config, runner=runner, max_model_len=1000) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            first = client.responses.create(model="tiny", input="hi", tools=[TOOL])
            reasoning, words, called = first.output
            assert (reasoning.type, words.type, called.type) == ("reasoning", "message", "function_call")
            assert first.output_text == "I look."
            assert json.loads(called.arguments) == {"id": 42}
            with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
                kinds = [event.type for event in stream]
                final = stream.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            assert final.output[2].parsed_arguments == {"id": 42}
            assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]

            # The output goes back as it came, with what the tool said.
            runner.script = saying('{"a":1}')
            result = {"type": "function_call_output", "call_id": called.call_id, "output": "42"}
            again = client.responses.create(
                model="tiny", input=[USER, *first.output, result], tools=[TOOL], stream=True
            )
            events = list(again)
            assert events[-1].response.output_text == '{"a":1}'
            parsed = client.responses.parse(model="tiny", input="hi", text_format=Answer)
            assert parsed.output_parsed == Answer(a=1)

            with pytest.raises(openai.NotFoundError) as missing:
                client.responses.retrieve(first.id)
            assert missing.value.body["reason"] == "response_not_stored"
            with pytest.raises(openai.NotFoundError):
                client.responses.cancel(first.id)
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(model="tiny", input="hi", previous_response_id=first.id)
            assert refused.value.param == "previous_response_id"

            runner.script, runner.seconds = letters, 0.002
            events = []
            with pytest.raises(openai.APIError, match="could not be finished"):
                for event in client.responses.create(model="tiny", input="hi", stream=True):
                    events.append(event.type)
                    if event.type == "response.output_text.delta":
                        runner.failure = RuntimeError("on fire")
            assert events[-1] == "response.failed"
