"""One HTTP exchange with an inference endpoint: read, start, answer whole or as a stream, and end in every case."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpu_serve.request import InvalidRequest
from tpu_serve.server.answer import Answer, Start
from tpu_serve.server.body import dump_json, error_response, json_response
from tpu_serve.server.errors import error_body, log_unexpected
from tpu_serve.server.load_report import load_report
from tpu_serve.server.logs import shown_prompt
from tpu_serve.server.parameters import ignored_header
from tpu_serve.server.service import Service
from tpu_serve.server.sse import CHUNKS, HEADERS, Frames, keeping_alive, until_disconnect
from tpu_serve.server.state import ServerState

logger = logging.getLogger(__name__)


class Exchange(Response):
    """The response of an inference endpoint. The whole exchange happens when it is called.

    A client that goes away, in either mode, ends its generations at once. Failures after the start of a stream are sent inside it.

    Args:
      start: starts the answer.
      frames: what its streams are made of.
      state["request_id"] of the scope: base of the answer's id, replaced by the body's when the client sent it there.
    """

    def __init__(self, state: ServerState, start: Start, frames: Frames = CHUNKS):
        super().__init__()
        self._state, self._start, self._frames = state, start, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            service = self._state.require_inference()
            with self._state.counting_inference():
                body = await self._state.bodies.read_json(scope, receive)
                await until_disconnect(self._answer(body, service, scope, receive, send), receive)
        except ClientDisconnect:
            return
        except InvalidRequest as error:
            known = self._state.overloaded(error) if error.reason == "queue_full" else error
            await error_response(known)(scope, receive, send)
        except Exception as error:
            log_unexpected(error, scope["state"]["request_id"])
            await error_response(error)(scope, receive, send)

    async def _answer(self, body: Any, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises only while nothing has been sent."""
        given_id = scope["state"]["request_id"] if scope["state"]["is_request_id_given"] else None
        started, outcome = time.monotonic(), "aborted"
        answer = await self._start(body, service, given_id)
        try:
            scope["state"]["request_id"] = answer.request_id
            if service.log_requests and self._state.config.max_log_len:
                shown = shown_prompt(body, self._state.config.max_log_len)
                logger.info("Request %s asks: %s", answer.request_id, shown)
            headers = {**ignored_header(answer.ignored), **load_report(Headers(scope=scope), service)}
            if answer.is_stream:
                outcome = await self._stream(answer, headers, send)
            else:
                payload = await answer.complete()
                outcome = "done"
                await json_response(payload, headers=headers)(scope, receive, send)
        except Exception as error:
            outcome = f"failed, {error_body(error)[1]['error']['reason']}"
            raise
        finally:
            answer.close()
            if service.log_requests:
                usage = answer.usage()
                logger.info(
                    "Request %s %s: %d prompt tokens (%d cached), %d completion tokens, %.3f s",
                    answer.request_id,
                    outcome,
                    usage.prompt_tokens,
                    usage.prompt_tokens_details.cached_tokens,
                    usage.completion_tokens,
                    time.monotonic() - started,
                )

    async def _stream(self, answer: Answer, headers: dict[str, str], send: Send) -> str:
        """Sends a stream to its end; returns the outcome in a word."""
        raw = [(name.encode(), value.encode()) for name, value in {**HEADERS, **headers}.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        outcome = "done"
        try:
            event = self._frames.event
            async with (
                aclosing(answer.stream()) as chunks,
                keeping_alive(send, self._state.config.sse_keep_alive_interval) as send_chunk,
            ):
                async for payload in chunks:
                    await send_chunk({"type": "http.response.body", "body": event(payload), "more_body": True})
        except Exception as error:
            log_unexpected(error, answer.request_id)
            failure = error_body(error)[1]
            outcome = f"failed, {failure['error']['reason']}"
            body = self._frames.failure(dump_json(failure))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": self._frames.end, "more_body": False})
        return outcome
