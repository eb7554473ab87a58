"""A request to /v1/responses as a request for a chat, and a chat's complaints in the words of the former."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server.chat_prompt import chat_prompt
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import ChatCompletionRequest, CommonFields, parse
from tpu_serve.server.responses_input import INSTRUCTING, Message, messages_of
from tpu_serve.server.responses_protocol import ResponseRequest
from tpu_serve.server.service import Service

_OF_FUNCTION = ("name", "description", "parameters", "strict")
_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}
_CHAT_NAME = re.compile(
    r"(?<![\w.])(?:response_format\.json_schema|response_format|reasoning_effort|max_completion_tokens)\b|\bmessages(?=\[)"
    r"|(?<=\])\.function(?=\.)|(?<=tool_choice)\.function(?=\.)"
)


def chat_body(request: ResponseRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The body of the chat request that means the same, and the names of what is lost on the way.

    Raises:
      InvalidRequest: the input, the tools or the form of the text are not what is served.
    """
    body: dict[str, Any] = request.model_dump(include=set(CommonFields.model_fields), exclude_unset=True, by_alias=True)
    tools, ignored = _tools(request.tools or ())
    optional = {
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": _response_format(request),
        "tools": tools or None,
        "tool_choice": _tool_choice(request.tool_choice, bool(tools)),
        "thinking_token_budget": request.thinking_token_budget,
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    body |= {
        "messages": messages_of(request.input, request.instructions),
        "parallel_tool_calls": request.parallel_tool_calls,
        "chat_template_kwargs": request.chat_template_kwargs,
        "stream": False,
    }
    if request.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return body, ignored


async def fitting(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """A chat's body whose prompt fits into the context, if dropping its oldest turns can make it so; instructions stay.

    Raises:
      InvalidRequest: the chat cannot be rendered.
    """
    messages: list[Message] = body["messages"]
    num_kept = 1 if messages[0]["role"] in INSTRUCTING else 0
    # A turn begins with the user: what a tool said means nothing without its call, and templates want a question.
    starts = [place for place in range(num_kept, len(messages)) if messages[place]["role"] == "user"]

    def from_start(start: int) -> dict[str, Any]:
        return {**body, "messages": messages[:num_kept] + messages[start:]}

    if not starts or await _fits(service, body):
        return body
    low, high = 0, len(starts) - 1  # the longest rest that fits, or else the shortest of all
    while low < high:
        middle = (low + high) // 2
        if await _fits(service, from_start(starts[middle])):
            high = middle
        else:
            low = middle + 1
    return from_start(starts[high])


async def _fits(service: Service, body: dict[str, Any]) -> bool:
    request, _ = parse(ChatCompletionRequest, body, strict_fields=False)
    try:
        prompt = await chat_prompt(service, request, with_tools=request.tool_choice != "none")
    except InvalidRequest as error:
        if error.reason == "context_length_exceeded":
            return False
        raise
    return len(prompt.token_ids) < service.info.max_model_len  # one token is left for the answer


def own_words(error: InvalidRequest) -> InvalidRequest:
    """What a chat complains of, by the names that these fields have in /v1/responses."""
    param = None if error.param is None else own_name(error.param).split(".")[0]
    message = _CHAT_NAME.sub(lambda match: _NAMES.get(match[0], ""), error.message)
    return InvalidRequest(param, message, error.reason, error.status)


def own_name(name: str) -> str:
    return _NAMES.get(name, name)


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Tools of a chat. What they hold beyond a function is checked there."""
    tools, ignored = [], dict[str, None]()
    for index, tool in enumerate(given):
        if tool.get("type") != "function":
            hint = "this server has no tools of its own, so tools must be functions"
            raise unsupported(f"tools[{index}].type", tool.get("type"), hint, param="tools")
        if isinstance(tool.get("function"), dict) and "name" not in tool:
            raise InvalidRequest(
                "tools", f"tools[{index}] must have its name and parameters beside its type, not in function."
            )
        tools.append(
            {"type": "function", "function": {key: tool[key] for key in _OF_FUNCTION if tool.get(key) is not None}}
        )
        further = (key for key, value in tool.items() if key not in ("type", *_OF_FUNCTION) and value is not None)
        ignored |= dict.fromkeys(f"tools.{key}" for key in further)
    return tools, tuple(ignored)


def _tool_choice(choice: object, has_tools: bool) -> object:
    if not has_tools and choice == "auto":  # what most clients send
        return None
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        hint = "use none, auto, required or {type: function, name}"
        raise unsupported("tool_choice.type", choice.get("type"), hint, param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(request: ResponseRequest) -> dict[str, Any] | None:
    given = None if request.text is None else request.text.format
    if given is None:
        return None
    if not isinstance(given.get("type"), str):
        raise InvalidRequest(
            "text", f"text.format.type must be a string, got {show(given.get('type'))}.", "invalid_type"
        )
    if given["type"] != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}
