"""The chat page at /: files that the server sends as they are, and nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Response


class PageFile(NamedTuple):
    """One file of the page: where it is served, what it is, and its bytes."""

    path: str
    media_type: str
    content: bytes


SECURITY_HEADERS = {
    # Everything comes from this server; text of a model can never become a script or a request to elsewhere.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_KINDS = {
    "index.html": ("/", "text/html; charset=utf-8"),
    "chat.css": ("/chat.css", "text/css; charset=utf-8"),
    "chat.js": ("/chat.js", "text/javascript; charset=utf-8"),
    "stream.js": ("/stream.js", "text/javascript; charset=utf-8"),
    "status.js": ("/status.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(path for path, _ in _KINDS.values())
"""They hold nothing secret, so they need no API key; the page asks for one when the server does."""


def page_files() -> list[PageFile]:
    """All files of the page."""
    folder = files(__name__)
    return [PageFile(path, kind, (folder / name).read_bytes()) for name, (path, kind) in _KINDS.items()]


def add_page(app: FastAPI) -> None:
    """Serves the page's files."""
    for file in page_files():
        app.add_api_route(file.path, _sending(file), methods=["GET"], include_in_schema=False)


def _sending(file: PageFile) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return Response(file.content, media_type=file.media_type, headers=SECURITY_HEADERS)

    return answer
