"""/docs: a page of our own that shows /openapi.json, so that it needs no network."""

from __future__ import annotations

from importlib import resources

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def add_docs(app: FastAPI) -> None:
    page = resources.files("tpu_serve.server").joinpath("docs.html").read_text(encoding="utf-8")

    async def docs() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _POLICY})

    app.add_api_route("/docs", docs, methods=["GET"], include_in_schema=False)
