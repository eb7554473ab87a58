"""The responses endpoint: a chat in other words. Nothing is kept between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from tpu_serve.request import FinishReason, InvalidRequest
from tpu_serve.server import answer as answers
from tpu_serve.server.body import dump_json
from tpu_serve.server.chat import ChatAnswer, start_chat
from tpu_serve.server.errors import error_body
from tpu_serve.server.replies import Usage, whole
from tpu_serve.server.responses_chat import chat_body, fitting, own_name, own_words
from tpu_serve.server.responses_output import Event, Events, OutputReader
from tpu_serve.server.responses_protocol import ResponseRequest, parse_response
from tpu_serve.server.responses_replies import (
    IncompleteDetails,
    Item,
    ResponseError,
    ResponseReply,
    ResponseUsage,
    Status,
)
from tpu_serve.server.service import Service, check_model


class ResponseAnswer:
    """See `Answer`. A stream tells of its own failure, then raises it."""

    def __init__(self, service: Service, request: ResponseRequest, chat: ChatAnswer, ignored: tuple[str, ...]):
        self.request_id, self.ignored, self.is_stream = chat.request_id, ignored, request.stream
        self._chat = chat
        self._events = Events()
        self._output = OutputReader(self._events, service.tokenizer, with_logprobs=request.wants_logprobs)
        self._head = {
            "id": f"resp_{chat.request_id}",
            "created_at": int(time.time()),
            "model": service.names[0],
            **_asked(service, request),
        }

    async def complete(self) -> dict[str, Any]:
        async for event in self._told():
            last = event
        assert not isinstance(last, bytes)
        response: dict[str, Any] = last["response"]
        return response

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._told()) as events:
                async for event in events:
                    yield event if isinstance(event, bytes) else dump_json(event)
        except Exception as error:
            failure = error_body(error)[1]["error"]
            message: str = failure["message"]
            failed = self._response("failed", self._output.so_far(), self.usage(), error=ResponseError(message=message))
            yield dump_json(self._events.make("response.failed", response=failed))
            # Clients end an iteration with an exception when an event holds an error.
            kind = {"code": ResponseError(message=message).code, "message": message, "param": failure["param"]}
            yield dump_json(self._events.make("error", **kind, error=failure))
            raise

    def usage(self) -> Usage:
        return self._chat.usage()

    def close(self) -> None:
        self._chat.close()

    async def _told(self) -> AsyncGenerator[Event, None]:
        """The events of an answer that succeeds; the last one holds the whole response."""
        for kind in ("response.created", "response.in_progress"):
            yield self._events.make(kind, response=self._response("in_progress", [], None))
        is_cut = False
        async with aclosing(self._chat.parts()) as parts:
            async for piece, deltas in parts:
                for event in self._output.read(piece, deltas):
                    yield event
                is_cut = piece.finish_reason is FinishReason.LENGTH
        status: Status = "incomplete" if is_cut else "completed"
        for event in self._output.finish(status):
            yield event
        details = IncompleteDetails(reason="max_output_tokens") if is_cut else None
        response = self._response(status, self._output.items, self.usage(), incomplete_details=details)
        yield self._events.make(f"response.{status}", response=response)

    def _response(
        self, status: Status | Literal["failed"], items: list[Item], usage: Usage | None, **fields: Any
    ) -> dict[str, Any]:
        return whole(
            ResponseReply(
                **self._head,
                status=status,
                completed_at=int(time.time()) if status == "completed" else None,
                output=items,
                usage=None if usage is None else ResponseUsage.of(usage),
                **fields,
            )
        )


def _asked(service: Service, request: ResponseRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    defaults = service.info.default_params
    text = request.text.model_dump(exclude_none=True) if request.text is not None else {}
    reasoning = request.reasoning.model_dump(exclude_none=True) if request.reasoning is not None else {}
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "temperature": defaults.get("temperature", 1.0) if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": defaults.get("top_p", 1.0) if request.top_p is None else request.top_p,
        "truncation": request.truncation,
    }


async def start_response(body: Any, service: Service, request_id: str | None = None) -> ResponseAnswer:
    """Checks a request and starts generating.

    Args:
      request_id: wins over the body's.

    Raises:
      InvalidRequest: the request cannot be served as asked.
    """
    request, ignored = parse_response(body, strict_fields=service.strict_fields)
    check_model(request.model, service.names)
    try:
        asked, lost = chat_body(request)
        if request.truncation == "auto":
            asked = await fitting(service, asked)
        chat = await start_chat(asked, service, request_id)
    except InvalidRequest as error:
        raise own_words(error) from None
    return ResponseAnswer(service, request, chat, ignored + lost + tuple(map(own_name, chat.ignored)))


async def create_response(body: Any, service: Service, request_id: str | None = None) -> dict[str, Any]:
    """The whole answer to a request, without HTTP.

    Raises:
      InvalidRequest, EngineDead, HttpError: see `errors.error_body`.
    """
    return await answers.complete(start_response, body, service, request_id)


def stream_response(body: Any, service: Service, request_id: str | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """The events of an answer, without HTTP; raises as `create_response` does, at any point."""
    return answers.stream(start_response, body, service, request_id)
