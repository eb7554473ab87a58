"""Request bodies in and JSON out."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import by_phrase, error_body, error_headers, show


async def read_json(scope: Scope, receive: Receive, max_bytes: int) -> Any:
    """The JSON value of a request's body, which is never held beyond `max_bytes`.

    Raises:
      HttpError: 413 for a larger body, 415 for one that does not say it is JSON.
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
    return parse_json(await _read(headers, receive, max_bytes))


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
    try:
        return from_json(data)
    except ValueError as error:
        raise InvalidRequest(None, f"The request body is not valid JSON: {error}.", "invalid_json") from None


def dump_json(value: Any) -> bytes:
    """JSON in pure ASCII: no client can split a character, or take an exotic line separator in a text for the end of an event."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dump_json(value), status, headers, media_type="application/json")


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    """The error body of any exception as a response."""
    status, body = error_body(error)
    return json_response(body, status, {**(headers or {}), **error_headers(error)})
