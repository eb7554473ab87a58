"""Every failure as the one error body that clients see: {"error": {message, type, param, code, reason}}."""

from __future__ import annotations

import http
import logging
import math
from typing import Any

from pydantic import ValidationError

from tpu_serve.engine.client import EngineDead, RequestFailed
from tpu_serve.request import InvalidRequest
from tpu_serve.scheduler.verdict import NOTHING_ALLOWED

logger = logging.getLogger(__name__)

MAX_ERRORS_SHOWN = 3
MAX_VALUE_SHOWN = 60
MAX_MESSAGE = 2000
NO_RETRY = {"x-should-retry": "false"}
"""Tells the `openai` client not to try a 409 or 5xx again."""
MAX_RETRY_AFTER = 60.0
"""Seconds; a client that waits longer has given up."""

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
# In the words of JSON rather than those of pydantic, which name our classes.
_WISHES = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "an array",
    "too_short": "a non-empty array",
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
}
_INTERNAL = "Something went wrong inside the server; its log has the details. Other requests are not affected."


class HttpError(Exception):
    """A failure that is about HTTP or the server's state and not about one field of a request.

    Attributes:
      type: the kind of error; the name that belongs to the status when left out.
      code: the body's code; the status when left out.
      headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        reason: str,
        *,
        type: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason
        self.type, self.code, self.headers = type, code, headers or {}


def unavailable(message: str, reason: str, retry_after: int) -> HttpError:
    """503: the same request may succeed in `retry_after` seconds, here or at another server."""
    return HttpError(503, message, reason, headers={"retry-after": str(retry_after)})


def shutting_down() -> HttpError:
    return unavailable("The server is shutting down; send the request again.", "server_shutting_down", 5)


def conflict(message: str, reason: str) -> HttpError:
    """409: the server is not in the state that this needs."""
    return HttpError(409, message, reason, headers=NO_RETRY)


def queue_full(message: str, status: int, seconds: float) -> HttpError:
    """429 or 503: the queue is full, and `seconds` is how long it takes to drain, as far as one can tell."""
    seconds = min(max(seconds, 0.1), MAX_RETRY_AFTER)
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
    return HttpError(status, message, "queue_full", headers=headers)


def not_served(message: str) -> HttpError:
    """501: something that clients of other servers ask for; the message says what to do instead."""
    return HttpError(501, message, "not_served", headers=NO_RETRY)


def unauthorized() -> HttpError:
    """401 in OpenAI's own words, which clients match on."""
    return HttpError(
        401,
        "Incorrect or missing API key: send it as 'Authorization: Bearer KEY'.",
        "invalid_api_key",
        type="invalid_request_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def by_phrase(status: int, message: str, reason: str, headers: dict[str, str] | None = None) -> HttpError:
    """An error of the protocol itself, such as 404 or 405: its type is the HTTP phrase."""
    # The standard renamed this phrase; Python follows by version.
    phrase = "Content Too Large" if status == 413 else http.HTTPStatus(status).phrase
    return HttpError(status, message, reason, type=phrase, headers=headers)


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of any exception. Unexpected ones say nothing of themselves: whoever catches them logs them."""
    if isinstance(error, InvalidRequest):
        return _body(error.status, error.message, error.reason, param=error.param)
    if isinstance(error, HttpError):
        return _body(error.status, error.message, error.reason, type=error.type, code=error.code)
    if isinstance(error, RequestFailed):
        if str(error) == NOTHING_ALLOWED:  # seen late, but what was asked for contradicts itself
            return _body(400, f"The request could not be finished: {NOTHING_ALLOWED}.", "nothing_allowed")
        return _body(500, f"The request could not be finished: {str(error).rstrip('.')}.", "request_failed")
    if isinstance(error, EngineDead):
        return _body(500, f"The request could not be finished: {error}.", "engine_failed")
    return _body(500, _INTERNAL, "internal_error")


def error_headers(error: BaseException) -> dict[str, str]:
    """Response headers that go with `error_body`."""
    if isinstance(error, HttpError):
        return error.headers
    if isinstance(error, InvalidRequest) and error.status in (429, 503):
        return {"retry-after": "1"}
    return {}


def log_unexpected(error: BaseException, request_id: str) -> None:
    """Logs the traceback of an exception that is a defect of ours; the others are answers like any other."""
    if not isinstance(error, InvalidRequest | HttpError | EngineDead | RequestFailed):
        logger.error("Request %s failed", request_id, exc_info=error)


def _body(
    status: int,
    message: str,
    reason: str,
    *,
    param: str | None = None,
    type: str | None = None,
    code: str | None = None,
) -> tuple[int, dict[str, Any]]:
    kind = type or _TYPES.get(status) or http.HTTPStatus(status).phrase
    shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
    return status, {"error": {"message": shown, "type": kind, "param": param, "code": code or status, "reason": reason}}


def show(value: object) -> str:
    """A value as an error message may repeat it: short, whatever was sent."""
    if isinstance(value, dict | list):
        return f"an {'object' if isinstance(value, dict) else 'array'} of {len(value)} items"
    if isinstance(value, str) and len(value) > MAX_VALUE_SHOWN:
        return repr(value[:MAX_VALUE_SHOWN]) + "…"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_VALUE_SHOWN else text[:MAX_VALUE_SHOWN] + "…"


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first few type errors as one sentence; `param` is the first field concerned."""
    problems: dict[str, str] = {}
    missing = False
    for problem in error.errors(include_url=False, include_context=False):
        path = _path(problem["loc"])
        if path in problems:  # the other types of a union
            continue
        if len(problems) == MAX_ERRORS_SHOWN:
            break
        if problem["type"] == "missing":
            missing = missing or not problems
            problems[path] = f"{path} is required"
        else:
            wish = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            wish = _WISHES.get(problem["type"], wish)
            problems[path] = f"{path} must be {wish}, got {show(problem['input'])}"
    # Of the types of a union, the complaint that goes deepest is about what was meant.
    problems = {
        path: text
        for path, text in problems.items()
        if not any(other.startswith((f"{path}.", f"{path}[")) for other in problems)
    }
    first = next(iter(problems), "")
    return InvalidRequest(
        first.split(".")[0].split("[")[0] or None,
        "; ".join(problems.values()) + ".",
        "missing_field" if missing else "invalid_type",
    )


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for ("messages", 0, "content"), without the names that pydantic gives to the types of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path
