"""What happens to every HTTP request on the way in and out: id, authorisation, metrics, and a last net for exceptions."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tpu_serve.server.body import error_response
from tpu_serve.server.errors import unauthorized
from tpu_serve.server.fanout import shutting_down
from tpu_serve.server.metrics import Metrics
from tpu_serve.server.service import clean_id

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
"""Paths that need no API key: what load balancers ask for."""
CLIENT_CLOSED = 499
"""Counted for requests whose client left before there was an answer; never sent."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})


class Edge:
    """The outermost application.

    It gives every request an id (`X-Request-Id`, the client's own when it sent one) and leaves it in the scope's state, where handlers may
    replace it; refuses requests without a valid key; counts and times; and turns what nobody caught into a 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, api_keys: Collection[str]):
        self._app, self._metrics = app, metrics
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        given_id = clean_id(headers.get("x-request-id", ""))
        state["request_id"], state["is_request_id_given"] = given_id or uuid.uuid4().hex, bool(given_id)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        started = time.monotonic()
        try:
            if scope["path"] in OPEN_PATHS or self._is_authorized(headers):
                await self._app(scope, receive, send_with_id)
            else:
                await error_response(unauthorized())(scope, receive, send_with_id)
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
            method = scope["method"] if scope["method"] in _METHODS else "OTHER"
            handler = getattr(scope.get("route"), "path", "none")
            self._metrics.http_request(handler, method, status or CLIENT_CLOSED, time.monotonic() - started)

    def _is_authorized(self, headers: Headers) -> bool:
        if not self._keys:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # Every key is compared in full, so that the time taken says nothing about any of them.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
