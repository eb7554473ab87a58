"""The input items of /v1/responses as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported

Message = dict[str, Any]
INSTRUCTING = ("system", "developer")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[Message]:
    """The conversation that an input is.

    Reasoning, words and calls that follow one another are one turn of the assistant, as they are in a chat. Instructions and the system and
    developer messages at the beginning are one message, because many templates take one, and only there.

    Raises:
      InvalidRequest: an item is of a kind that is not served, or lacks what its kind has.
    """
    conversation = _Conversation()
    if instructions:
        conversation.say("system", instructions)
    if isinstance(given, str):
        conversation.say("user", given)
    else:
        for index, item in enumerate(given):
            conversation.add(f"input[{index}]", item)
    return conversation.messages


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._names: dict[str, str] = {}

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                role = _string(where, item, "role")
                if role not in ("user", "assistant", *INSTRUCTING):
                    wish = "user, assistant, system or developer"
                    raise InvalidRequest("input", f"{where}.role must be {wish}, got {show(role)}.")
                self.say(role, _text(f"{where}.content", item.get("content")))
            case "reasoning":
                self._think(_thought(where, item))
            case "function_call":
                self._call(where, item)
            case "function_call_output":
                call_id = _string(where, item, "call_id")
                message: Message = {"role": "tool", "tool_call_id": call_id}
                if call_id in self._names:
                    message["name"] = self._names[call_id]
                self.messages.append({**message, "content": _text(f"{where}.output", item.get("output"))})
            case "item_reference":
                raise unsupported(f"{where}.type", kind, "nothing is stored, so send the item itself", param="input")
            case _:
                raise unsupported(
                    f"{where}.type", kind, f"an item must be one of {', '.join(ITEM_TYPES)}", param="input"
                )

    def say(self, role: str, text: str) -> None:
        last = self._last(role)
        if role in INSTRUCTING and len(self.messages) == 1 and self.messages[0]["role"] in INSTRUCTING:
            self.messages[0]["content"] += "\n\n" + text
        elif last is not None and role == "assistant" and not last["content"] and "tool_calls" not in last:
            last["content"] = text  # what was thought before it is its reasoning
        else:
            self.messages.append({"role": role, "content": text})

    def _think(self, text: str) -> None:
        if text:
            self.messages.append({"role": "assistant", "content": "", "reasoning": text})

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        call_id, name = _string(where, item, "call_id"), _string(where, item, "name")
        function = {"name": name, "arguments": _string(where, item, "arguments")}
        self._names[call_id] = name
        turn = self._last("assistant")
        if turn is None:
            turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _last(self, role: str) -> Message | None:
        """The last message, if it is of this role."""
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == role else None


def _string(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest("input", f"{where}.{name} must be a string, got {show(value)}.", "invalid_type")
    return value


def _text(where: str, content: object) -> str:
    """A text, or the text parts of one joined by newlines, as in a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(
            "input", f"{where} must be a string or an array of parts, got {show(content)}.", "invalid_type"
        )
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest("input", f"{where} must be an object, got {show(part)}.", "invalid_type")
    kind = part.get("type")
    if kind == "refusal":
        return _string(where, part, "refusal")
    if kind not in _TEXT_PARTS:
        raise unsupported(f"{where}.type", kind, "this server reads text only", param="input")
    return _string(where, part, "text")


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """The text of a reasoning item; of one with a summary only, that."""
    for name in ("content", "summary"):
        if item.get(name):
            return _text(f"{where}.{name}", item[name])
    return ""
