"""POST /invocations, the one path of hosting platforms: the body says which endpoint is meant."""

from __future__ import annotations

from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server.answer import Answer
from tpu_serve.server.chat import start_chat
from tpu_serve.server.completions import start_completion
from tpu_serve.server.service import Service


async def start_invocation(body: Any, service: Service, request_id: str | None = None) -> Answer:
    """Starts a chat for a body with `messages`, and a completion for one with `prompt`.

    Raises:
      InvalidRequest: it has neither, or cannot be served as asked.
    """
    if isinstance(body, dict) and body.get("messages") is not None:
        return await start_chat(body, service, request_id)
    if isinstance(body, dict) and "prompt" not in body:
        raise InvalidRequest(
            "messages", "The body must have messages, for a chat, or prompt, for a completion.", "missing_field"
        )
    return await start_completion(body, service, request_id)
