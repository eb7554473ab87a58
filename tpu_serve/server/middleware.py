"""What happens to every HTTP request on the way in and out: id, authorisation, metrics, and a last net for exceptions."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpu_serve.config import ServerConfig
from tpu_serve.server.body import error_response
from tpu_serve.server.context import current_scope
from tpu_serve.server.errors import by_phrase, shutting_down, unauthorized
from tpu_serve.server.metrics import Metrics
from tpu_serve.server.page import PATHS
from tpu_serve.server.service import clean_id

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ping", "/version"}) | PATHS
"""Paths that need no API key: what load balancers ask for, and the files of the chat page."""
CLIENT_CLOSED = 499
"""Counted for requests whose client left before there was an answer; never sent."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class Edge:
    """The outermost application.

    It gives every request an id (`X-Request-Id`, the client's own when it sent one) and leaves it in the scope's state, where handlers may
    replace it; refuses requests without a valid key or with too many headers; answers HEAD as GET without a body; takes off the path that a
    proxy adds; counts and times; and turns what nobody caught into a 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, config: ServerConfig):
        self._app, self._metrics, self._config = app, metrics, config
        self._keys = [key.encode() for key in config.api_keys]
        self._open_paths = OPEN_PATHS | ({"/metrics", "/metrics/"} if config.metrics_without_key else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_head = scope["method"] == "HEAD"
        if is_head:  # in a copy: whoever serves this application leaves out the body by what is in its own
            scope = {**scope, "method": "GET"}
        if self._config.root_path:
            scope = {**scope, "root_path": self._config.root_path}
        state = scope.setdefault("state", {})
        given_id = clean_id(headers.get("x-request-id", ""))
        state["request_id"], state["is_request_id_given"] = given_id or uuid.uuid4().hex, bool(given_id)
        status = request_bytes = response_bytes = 0

        async def receive_and_count() -> Message:
            nonlocal request_bytes
            message = await receive()
            request_bytes += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, response_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._config.enable_request_id_headers:
                    MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            response_bytes += len(message.get("body", b""))
            await send(message)

        started, token = time.monotonic(), current_scope.set(scope)
        try:
            await (self._refusal(scope, headers) or self._app)(scope, receive_and_count, send_with_id)
        except asyncio.CancelledError:
            # The server ends while this client still sends its body, or reads nothing.
            if not status:
                await error_response(shutting_down())(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("Request %s failed", state["request_id"])
            if status:  # too late to say so in a response; the server closes the connection
                raise
            await error_response(error)(scope, receive, send_with_id)
        finally:
            method = "HEAD" if is_head else scope["method"] if scope["method"] in _METHODS else "OTHER"
            handler = getattr(scope.get("route"), "path", "none")
            self._metrics.http_request(
                handler, method, status or CLIENT_CLOSED, time.monotonic() - started, request_bytes, response_bytes
            )
            current_scope.reset(token)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that goes no further."""
        most = self._config.h11_max_header_count
        if len(headers.raw) > most:
            message = (
                f"The request has {len(headers.raw)} headers; at most {most} are allowed (--h11-max-header-count)."
            )
            return error_response(by_phrase(431, message, "too_many_headers", {"connection": "close"}))
        # The path as the router will see it: no other reading of it may open a door.
        if get_route_path(scope) in self._open_paths or self._is_authorized(headers):
            return None
        return error_response(unauthorized())

    def _is_authorized(self, headers: Headers) -> bool:
        if not self._keys:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # Every key is compared in full, so that the time taken says nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
