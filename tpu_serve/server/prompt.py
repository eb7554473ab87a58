"""Prompts of every form as token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.protocol import ChatFields
from tpu_serve.server.service import LONG_TEXT, Service
from tpu_serve.text.chat_template import RENDER_ARGUMENTS

MAX_PROMPTS = 1024
MESSAGE_OVERHEAD = 50
"""Characters that a message or a part of one costs as much as, besides its text."""


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: one text, several, one list of token ids, or several such lists.

    Raises:
      InvalidRequest: it is none of these, or empty.
    """
    prompts = prompt if isinstance(prompt, list) and not _are_token_ids(prompt) else [prompt]
    if prompt is None or not prompts or any(item == "" or item == [] for item in prompts):
        raise InvalidRequest("prompt", "The prompt must be provided and non-empty.", "empty_prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.")
    for place, item in enumerate(prompts):
        if type(item) is not type(prompts[0]) or not (isinstance(item, str) or _are_token_ids(item)):
            where = f"prompt[{place}]" if prompts is prompt else "prompt"
            raise InvalidRequest(
                "prompt",
                f"prompt must be a string, a list of strings, a list of token ids or a list of such lists; {where} is {show(item)}.",
                "invalid_type",
            )
    return list(prompts)


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _size(content: Any) -> int:
    """About how many characters a message's content has."""
    if isinstance(content, list):
        return sum(MESSAGE_OVERHEAD + len(str(part.get("text", ""))) for part in content)
    return len(content or "")


async def chat_token_ids(service: Service, request: ChatFields) -> tuple[list[int], tuple[str, ...]]:
    """Token ids of a chat prompt, and the names of template variables that the template does not know.

    Raises:
      InvalidRequest: there is no template, or it cannot render these messages.
    """
    template = service.chat_template
    if template is None:
        raise InvalidRequest(
            "messages",
            "This model has no chat template, so it cannot chat: use /v1/completions, or start the server with --chat-template.",
            "no_chat_template",
        )
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "continue_final_message", "continue_final_message and add_generation_prompt cannot both be true."
        )
    variables = request.chat_template_kwargs
    for name in variables:
        if name in RENDER_ARGUMENTS or not name.isidentifier() or name == "self":
            raise InvalidRequest("chat_template_kwargs", f"chat_template_kwargs cannot set {show(name)}.")
    for index, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":  # an assistant's turn may hold tool calls only
            raise InvalidRequest(
                "messages", f"messages[{index}].content is required for the role {show(message.role)}."
            )
    size = sum(MESSAGE_OVERHEAD + _size(message.content) for message in request.messages)

    def render() -> str:
        assert template is not None
        messages = [message.model_dump(exclude_unset=True) for message in request.messages]
        return template.render(
            messages,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            **variables,
        )

    text = render() if size < LONG_TEXT else await asyncio.to_thread(render)
    unknown = tuple(f"chat_template_kwargs.{name}" for name in variables if name not in template.variables)
    if request.documents is not None and "documents" not in template.variables:
        unknown += ("documents",)
    return await service.encode(text, request.add_special_tokens, "messages"), unknown
