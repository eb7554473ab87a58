"""Which HTTP request the code at hand works for, for log lines and traces."""

from __future__ import annotations

from contextvars import ContextVar

from starlette.types import Scope

current_scope: ContextVar[Scope | None] = ContextVar("current_scope", default=None)
"""The ASGI scope of the exchange under way in this task and those it started, None outside of one."""


def current_request_id() -> str | None:
    """The id of the exchange under way, which the body may have replaced meanwhile."""
    scope = current_scope.get()
    request_id = None if scope is None else scope.get("state", {}).get("request_id")
    return None if request_id is None else str(request_id)
