"""Request bodies in and JSON out."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import by_phrase, error_body, error_headers, show, shutting_down

LARGE_BODY = 65_536
"""Bytes."""


class BodyReader:
    """Reads request bodies within the server's limits.

    Args:
      max_bytes: largest body; no more of one is ever held.
      seconds: how long one may take to arrive.
    """

    def __init__(self, max_bytes: int, seconds: float):
        self._max_bytes, self._seconds = max_bytes, seconds
        self._waiting: set[asyncio.Timeout] = set()
        self._is_hurried = False

    def hurry(self, seconds: float) -> None:
        """Gives every body under way, and every later one, at most so many seconds more: the server is about to end."""
        self._is_hurried, self._seconds = True, min(self._seconds, seconds)
        latest = asyncio.get_running_loop().time() + self._seconds
        for timeout in self._waiting:
            timeout.reschedule(min(timeout.when() or latest, latest))

    async def read_json(self, scope: Scope, receive: Receive) -> Any:
        """The JSON value of a request's body.

        Raises:
          HttpError: 413 for a larger body, 415 for one that does not say it is JSON, 408 for one that does not arrive in time and 503
            when the server ends meanwhile.
          InvalidRequest: what came is not JSON; the message has line and column.
          ClientDisconnect: it did not arrive whole.
        """
        headers = Headers(scope=scope)
        media_type = headers.get("content-type", "").split(";")[0].strip().lower()
        if media_type != "application/json":
            raise by_phrase(
                415,
                f"Unsupported Media Type: Only 'application/json' is allowed, got {show(media_type) if media_type else 'none'}.",
                "unsupported_media_type",
            )
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                self._waiting.add(timeout)
                try:
                    data = await _read(headers, receive, self._max_bytes)
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            raise shutting_down() if self._is_hurried else self._too_slow() from None
        return parse_json(data)

    def _too_slow(self) -> Exception:
        return by_phrase(
            408,
            f"The request body did not arrive within {self._seconds:g} seconds (--body-timeout).",
            "body_timeout",
            headers={"connection": "close"},
        )


async def _read(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> Exception:
    # What is left of the body is not read, so the connection cannot carry another request.
    return by_phrase(
        413,
        f"The request body is larger than the limit of {max_bytes} bytes (--max-request-bytes).",
        "request_too_large",
        headers={"connection": "close"},
    )


def parse_json(data: bytes) -> Any:
    """Reads JSON. NaN and infinities are read, so that the message can name the field they stand in.

    Raises:
      InvalidRequest: it is not JSON, with line and column.
    """
    # The collector would look through the growing value again and again, which takes most of the time of a large one.
    was_enabled = gc.isenabled() and len(data) > LARGE_BODY
    if was_enabled:
        gc.disable()
    try:
        return from_json(data)
    except ValueError as error:
        raise InvalidRequest(None, f"The request body is not valid JSON: {error}.", "invalid_json") from None
    finally:
        if was_enabled:
            gc.enable()


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_quoted = json.encoder.encode_basestring_ascii


def dump_json(value: Any) -> bytes:
    """JSON in pure ASCII: no client can split a character, or take an exotic line separator in a text for the end of an event."""
    return _ENCODER.encode(value).encode("ascii")


def json_text(value: str | int | None) -> str:
    """The same of a single text, integer or None, as text."""
    if isinstance(value, str):
        return _quoted(value)
    return "null" if value is None else str(int(value))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status, headers, media_type="application/json")


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    """The error body of any exception as a response."""
    status, body = error_body(error)
    return json_response(body, status, {**(headers or {}), **error_headers(error)})
