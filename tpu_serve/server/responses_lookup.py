"""Paths of responses that were given before: none is kept, so there is none to find."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from tpu_serve.server.errors import HttpError

_METHODS = ["GET", "POST", "DELETE"]


def add_lookup(app: FastAPI) -> None:
    """Adds the paths under /v1/responses. They are no part of the document that describes the server."""

    async def refuse(request: Request) -> Response:
        raise HttpError(
            404,
            "Responses are not stored, so none can be read, cancelled or deleted: each ends with its own request, and a client that closes "
            "the connection cancels it.",
            "response_not_stored",
        )

    app.add_api_route("/v1/responses/{rest:path}", refuse, methods=_METHODS, include_in_schema=False)
