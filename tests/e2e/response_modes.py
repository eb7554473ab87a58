"""A response asked for as a whole and as a stream, which must say the same."""

from __future__ import annotations

import json
from typing import Any

from fakes import Served
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tpu_serve.server.responses_replies import ResponseEvent, ResponseReply

RESPONSES = "/v1/responses"
CLIENT_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TIMES = ("created_at", "completed_at")
USER = {"role": "user", "content": "hi"}
TOOL: Any = {
    "type": "function",
    "name": "f",
    "description": "does it",
    "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    "strict": True,
}
OTHER = {"type": "function", "name": "g", "parameters": {"type": "object", "properties": {}}}
TOOLS = {"tools": [TOOL, OTHER]}
LOGPROBS = {"include": ["message.output_text.logprobs"]}


def parse_named_events(text: str) -> list[dict[str, Any]]:
    """Payloads of a stream of named events; checks its frame."""
    assert text.isascii()
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def check_schema(event: dict[str, Any]) -> None:
    """The event is what the server's document says, and what the client's own types say."""
    ResponseEvent.model_validate(event, extra="forbid")
    CLIENT_EVENT.validate_python(event)


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events between the beginning and the end tell of; checks that they agree with one another."""
    output: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            assert not event["item"].get("content")
            assert not event["item"].get("arguments")
            output.append(event["item"])
            is_open, text, logprobs = True, "", []
            continue
        assert is_open
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            shown = (
                event["item"]["arguments"] if item["type"] == "function_call" else event["item"]["content"][0]["text"]
            )
            assert shown == text
            if item["type"] == "message":
                assert event["item"]["content"][0]["logprobs"] == logprobs
            output[-1], is_open = event["item"], False
            continue
        assert event["item_id"] == item["id"]
        assert event.get("content_index", 0) == 0
        if kind == "content_part.added":
            assert event["part"]["text"] == ""
        elif kind.endswith(".delta"):
            assert event["delta"]
            text += event["delta"]
            logprobs += event.get("logprobs", [])
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        else:
            assert event.get("text", event.get("arguments")) == text
            assert event.get("logprobs", []) == logprobs
    assert not is_open
    return output


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    """A response without ids, which are fresh each time and different, and times."""
    items = response["output"]
    ids = [response["id"], *(item["id"] for item in items), *(item.get("call_id") for item in items)]
    ids = [given for given in ids if given is not None]
    assert len(set(ids)) == len(ids)
    plain = {name: value for name, value in response.items() if name not in (*TIMES, "id", "output", "usage")}
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]
    usage = {**response["usage"], "input_tokens_details": None}  # the second one finds the first in the cache
    return {**plain, "output": items, "usage": usage}


async def ask(served: Served, **fields: Any) -> dict[str, Any]:
    """Asks in both modes, compares them and what the events say with the end, and returns the whole response."""
    body = {"input": "hi", **fields}
    response = await served.post(RESPONSES, body)
    assert response.status_code == 200, response.text
    whole = response.json()
    ResponseReply.model_validate(whole, extra="forbid")
    Response.model_validate(whole)
    response = await served.post(RESPONSES, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = parse_named_events(response.text)
    for event in events:
        check_schema(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    for event in events[:2]:
        started = event["response"]
        assert (started["status"], started["output"], started["usage"]) == ("in_progress", [], None)
        assert started["id"] == last["response"]["id"]
    assert rebuilt(events[2:-1]) == last["response"]["output"]
    assert nameless(last["response"]) == nameless(whole)
    assert whole["id"].startswith("resp_")
    await served.idle()
    return whole


def brief(response: dict[str, Any]) -> list[Any]:
    """The output in short: (type, text) or (name, arguments), and the status of what is not whole."""
    shown: list[Any] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            shown.append((item["name"], item["arguments"]))
        else:
            (part,) = item["content"]
            shown.append((item["type"], part["text"]))
        if item["status"] != "completed":
            shown.append(item["status"])
    return shown
