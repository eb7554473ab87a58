"""The prompt of a chat: messages, tools and template variables through the chat template."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpu_serve.option import ConfigError
from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import ChatFields, GenerationFields
from tpu_serve.server.service import LONG_TEXT, Service
from tpu_serve.server.tools import check_tools
from tpu_serve.text.chat_template import RENDER_ARGUMENTS, ChatTemplate

MESSAGE_OVERHEAD = 50
"""Characters that a message or a part of one costs as much as, besides its text."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatPrompt(NamedTuple):
    """
    Attributes:
      text: special tokens written out.
      ignored: names of fields that the template does not know.
    """

    token_ids: list[int]
    text: str
    ignored: tuple[str, ...]


async def chat_prompt(service: Service, request: ChatFields, *, with_tools: bool = True) -> ChatPrompt:
    """
    Args:
      with_tools: show the request's tools to the model.

    Raises:
      InvalidRequest: there is no template, or it cannot render these messages.
    """
    template = _template(service, request)
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "continue_final_message", "continue_final_message and add_generation_prompt cannot both be true."
        )
    tools = check_tools(request.tools)
    variables, ignored = _variables(service, request, template)
    for index, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":  # an assistant's turn may hold tool calls only
            raise InvalidRequest(
                "messages", f"messages[{index}].content is required for the role {show(message.role)}."
            )
    if request.documents is not None and "documents" not in template.variables:
        ignored += ("documents",)
    if tools and with_tools and "tools" not in template.variables:
        ignored += ("tools",)
    size = sum(MESSAGE_OVERHEAD + _size(message.content) for message in request.messages)

    def render() -> str:
        return template.render(
            [message.model_dump(exclude_unset=True) for message in request.messages],
            tools=tools if tools and with_tools else None,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            **variables,
        )

    is_long = size >= LONG_TEXT or len(tools) > 20 or request.chat_template is not None
    text = await asyncio.to_thread(render) if is_long else render()
    must_fit = isinstance(request, GenerationFields) and request.truncate_prompt_tokens is None
    token_ids = await service.encode(text, request.add_special_tokens, "messages", is_prompt=must_fit)
    return ChatPrompt(token_ids, text, ignored)


def _template(service: Service, request: ChatFields) -> ChatTemplate:
    if request.chat_template is not None:
        if not service.trusts_templates:
            raise unsupported(
                "chat_template",
                request.chat_template,
                "a template is a program, so the server takes one only when it is started with --trust-request-chat-template",
            )
        try:
            return _compiled(request.chat_template, tuple(sorted(service.tokenizer.special_tokens.items())))
        except ConfigError as error:
            raise InvalidRequest("chat_template", str(error), "invalid_template") from None
    if service.chat_template is None:
        raise InvalidRequest(
            "messages",
            "This model has no chat template, so it cannot chat: use /v1/completions, or start the server with --chat-template.",
            "no_chat_template",
        )
    return service.chat_template


@functools.lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _variables(
    service: Service, request: ChatFields, template: ChatTemplate
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Variables for the template, and the fields that set some which it does not know."""
    given = request.chat_template_kwargs
    for name in given:
        if name in RENDER_ARGUMENTS or not name.isidentifier() or name == "self":
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs cannot set {show(name)}.")
    ignored = tuple(f"chat_template_kwargs.{name}" for name in given if name not in template.variables)
    effort: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        if request.reasoning_effort not in EFFORTS:
            raise InvalidRequest(
                "reasoning_effort",
                f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {show(request.reasoning_effort)}.",
            )
        effort = {
            "reasoning_effort": request.reasoning_effort,
            "enable_thinking": request.reasoning_effort != "none",
        }
        if not template.variables.intersection(effort):
            ignored += ("reasoning_effort",)
    return {**service.template_variables, **effort, **given}, ignored


def _size(content: str | Sequence[Mapping[str, Any]] | None) -> int:
    """About how many characters a message's content has."""
    if isinstance(content, str) or content is None:
        return len(content or "")
    return sum(MESSAGE_OVERHEAD + len(str(part.get("text", ""))) for part in content)
