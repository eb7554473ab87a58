"""A chat answer asked for as a whole and as a stream, which must say the same."""

from __future__ import annotations

from typing import Any

from fakes import Served, parse_events

from tpu_serve.server.replies import ChatChunk, ChatReply

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def function(name: str, **properties: Any) -> dict[str, Any]:
    """A tool whose arguments have these schemas, all of them required."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that a stream makes, in the shape of `plain`. Checks the order in which things come."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            delta = part["delta"]
            choice = choices.get(part["index"])
            if choice is None:
                assert delta == {"role": "assistant", "content": ""}
                choice = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None, "token_ids": []}
                choices[part["index"]] = choice
                continue
            assert choice["finish_reason"] is None, "a chunk came after the last one"
            assert len(delta) - ("reasoning_content" in delta) <= 1
            assert delta or part["finish_reason"], "a chunk says nothing"
            choice["content"] += delta.get("content", "")
            choice["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                calls = choice["tool_calls"]
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["index"] == len(calls) - 1
                    assert call["function"].keys() == {"arguments"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part.get("stop_reason")
    return choices


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "tool_calls": message["tool_calls"] or [],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "token_ids": choice["token_ids"],
    }


def nameless(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the ids of its calls, which are fresh each time, and different."""
    ids = [call["id"] for call in choice["tool_calls"]]
    assert len(set(ids)) == len(ids)
    return {**choice, "tool_calls": [call["function"] for call in choice["tool_calls"]]}


async def ask(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """Asks in both modes, compares them, and returns the choices of the whole answer."""
    body = {"messages": USER, "return_token_ids": True, **fields}
    response = await served.post(CHAT, body)
    assert response.status_code == 200, response.text
    whole = response.json()
    ChatReply.model_validate(whole, extra="forbid")
    response = await served.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    chunks = parse_events(response.text)
    for chunk in chunks:
        ChatChunk.model_validate(chunk, extra="forbid")
    choices = joined(chunks)
    assert {index: nameless(choice) for index, choice in choices.items()} == {
        choice["index"]: nameless(plain(choice)) for choice in whole["choices"]
    }
    usages = [chunks[-1]["usage"], whole["usage"]]
    for usage in usages:
        usage.pop("prompt_tokens_details")
    assert usages[0] == usages[1]
    await served.idle()
    return [{**choice, "usage": whole["usage"]} for choice in whole["choices"]]


async def ask_one(served: Served, **fields: Any) -> tuple[str | None, str | None, list[tuple[str, str]], str]:
    """Content, reasoning, calls as (name, arguments) and the finish reason of an answer with one choice."""
    (choice,) = await ask(served, **fields)
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"] or []]
    return message["content"], message["reasoning"], calls, choice["finish_reason"]
