"""The tools of a chat request and what it says about their use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import ChatCompletionRequest

MAX_TOOLS = 512
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
"""Other characters end a name in one or the other of the forms in which models write calls."""
Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """
    Attributes:
      tools: as the request has them.
      mode: whether the model may call them, must, or must call the one that is `name`d.
      keeps_one: of several calls only the first counts.
    """

    tools: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    mode: Mode = "none"
    name: str = ""
    keeps_one: bool = False

    @property
    def reads_calls(self) -> bool:
        return self.mode != "none"

    @property
    def is_forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def forced_tools(self) -> list[Mapping[str, Any]]:
        """The tools that a forced call may be of."""
        if self.mode != "named":
            return list(self.tools)
        return [tool for tool in self.tools if tool["function"]["name"] == self.name][:1]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    """The tools, each of them a function with a name.

    Raises:
      InvalidRequest: the list is empty, or something in it is no such tool.
    """
    if tools is None:
        return ()
    if not tools:
        raise InvalidRequest("tools", "tools must hold at least one tool; leave it out to have none.", "empty_tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are allowed.")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise InvalidRequest("tools", f"{where}.type must be 'function', got {show(tool.get('type'))}.")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest("tools", f"{where}.function must be an object, got {show(function)}.", "invalid_type")
        for name, kind, wish in (
            ("name", str, "a non-empty string"),
            ("description", str, "a string"),
            ("parameters", dict, "a JSON schema, an object"),
            ("strict", bool, "true or false"),
        ):
            value = function.get(name)
            if (value is None and name != "name") or (isinstance(value, kind) and value != ""):
                continue
            if value == "" and name != "name":
                continue
            raise InvalidRequest("tools", f"{where}.function.{name} must be {wish}, got {show(value)}.", "invalid_type")
        if not TOOL_NAME.fullmatch(function["name"]):
            raise InvalidRequest(
                "tools",
                f"{where}.function.name must be 1 to 128 letters, digits, dots, colons, underscores and dashes, got {show(function['name'])}.",
            )
    return tools


def read_tools(request: ChatCompletionRequest, *, knows_calls: bool, allows_auto: bool) -> ToolUse:
    """What a request wants with its tools.

    Args:
      knows_calls: calls in the model's own form can be read.
      allows_auto: the model may decide.

    Raises:
      InvalidRequest: the fields contradict each other, or the server cannot do it.
    """
    tools, choice = check_tools(request.tools), request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice", "When using `tool_choice`, `tools` must be set.")
        return ToolUse()
    keeps_one = not request.parallel_tool_calls
    if choice in (None, "auto"):
        if not allows_auto:
            raise unsupported(
                "tool_choice",
                "auto",
                "the server was started with --no-enable-auto-tool-choice; use none, required or a function",
            )
        if not knows_calls:
            raise unsupported(
                "tools" if choice is None else "tool_choice",
                show(tools) if choice is None else "auto",
                "how this model writes calls is not known, so start the server with --tool-call-parser, or force a call with "
                "tool_choice required or a function",
            )
        return ToolUse(tools, "auto", keeps_one=keeps_one)
    if choice in ("none", "required"):
        return ToolUse(tools, choice, keeps_one=keeps_one)
    if isinstance(choice, str) or not isinstance(choice, dict):
        raise InvalidRequest(
            "tool_choice",
            f"tool_choice must be none, auto, required or an object that names a function, got {show(choice)}.",
        )
    return ToolUse(tools, "named", _named(choice, tools), keeps_one=True)


def _named(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    if choice.get("type") != "function":
        raise InvalidRequest("tool_choice", f"tool_choice.type must be 'function', got {show(choice.get('type'))}.")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("tool_choice", "tool_choice.function.name must be a string: the name of one of the tools.")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise InvalidRequest(
            "tool_choice",
            f"The tool {show(name)} of tool_choice is not one of the tools of the request: {', '.join(map(show, names[:10]))}.",
            "tool_not_found",
        )
    return name
