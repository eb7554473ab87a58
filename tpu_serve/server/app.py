"""The HTTP application: which path is answered by what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from tpu_serve import __version__
from tpu_serve.config import ServerConfig
from tpu_serve.request import InvalidRequest
from tpu_serve.server import models, openapi
from tpu_serve.server.answer import Start
from tpu_serve.server.body import error_response, json_response
from tpu_serve.server.chat import start_chat
from tpu_serve.server.completions import start_completion
from tpu_serve.server.control import add_control
from tpu_serve.server.docs_page import add_docs
from tpu_serve.server.errors import HttpError, by_phrase
from tpu_serve.server.exchange import Exchange
from tpu_serve.server.invocations import start_invocation
from tpu_serve.server.middleware import Edge
from tpu_serve.server.page import add_page
from tpu_serve.server.parameters import ignored_header
from tpu_serve.server.replies import ModelCard, ModelList
from tpu_serve.server.responses import start_response
from tpu_serve.server.responses_lookup import add_lookup
from tpu_serve.server.service import Service, check_model
from tpu_serve.server.sse import CHUNKS, NAMED_EVENTS, Frames
from tpu_serve.server.state import ServerState
from tpu_serve.server.status import add_status
from tpu_serve.server.tokenization import detokenize, tokenize
from tpu_serve.server.unserved import add_unserved


def create_app(config: ServerConfig, state: ServerState) -> FastAPI:
    """The application over a state, which may still be loading."""
    app = FastAPI(
        title="tpu-serve",
        version=__version__,
        redirect_slashes=False,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Edge, metrics=state.metrics, config=config)
    # Outside of the edge: browsers ask first without the key, and read refusals only with these headers.
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins or ("*",),
        allow_methods=config.allowed_methods or ("*",),
        allow_headers=config.allowed_headers or ("*",),
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id", "x-tpu-serve-ignored", "retry-after", "retry-after-ms"),
    )
    for kind in (InvalidRequest, HttpError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_inference(app, state)
    _add_text(app, state)
    _add_models(app, state)
    add_status(app, state)
    add_control(app, state)
    if not config.disable_fastapi_docs:
        add_docs(app)
    add_page(app)
    add_lookup(app)
    add_unserved(app)
    openapi.complete(app)
    return app


def _add_inference(app: FastAPI, state: ServerState) -> None:
    def add(path: str, start: Start, document: dict[str, Any], frames: Frames = CHUNKS) -> None:
        async def answer(request: Request) -> Response:
            return Exchange(state, start, frames)

        app.add_api_route(path, answer, methods=["POST"], operation_id=path.strip("/").replace("/", "_"), **document)

    add("/v1/chat/completions", start_chat, openapi.CHAT)
    add("/v1/completions", start_completion, openapi.COMPLETION)
    add("/v1/responses", start_response, openapi.RESPONSE, NAMED_EVENTS)
    add("/invocations", start_invocation, openapi.INVOCATION)


def _add_text(app: FastAPI, state: ServerState) -> None:
    Work = Callable[[Any, Service], Awaitable[tuple[dict[str, Any], tuple[str, ...]]]]  # noqa: N806

    def add(path: str, work: Work, document: dict[str, Any]) -> None:
        async def answer(request: Request) -> Response:
            service = state.require_service()
            try:
                body = await state.bodies.read_json(request.scope, request.receive)
            except ClientDisconnect:
                return Response()
            reply, ignored = await work(body, service)
            return json_response(reply, headers=ignored_header(ignored))

        app.add_api_route(path, answer, methods=["POST"], operation_id=path.strip("/"), **document)

    add("/tokenize", tokenize, openapi.TOKENIZE)
    add("/detokenize", detokenize, openapi.DETOKENIZE)


def _add_models(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models", response_model=ModelList, operation_id="models", responses=openapi.UNAUTHORIZED)
    async def list_models() -> Response:
        return json_response(models.model_list(state))

    @app.get("/v1/models/{id:path}", response_model=ModelCard, responses=openapi.ERRORS)
    async def show_model(id: str) -> Response:
        check_model(id, state.names)
        return json_response(models.model_card(state, id))


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the shape of every other error."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        known = by_phrase(404, "There is nothing at this path; /docs lists every endpoint.", "not_found")
    elif error.status_code == 405:
        allowed = Headers(error.headers or {}).get("allow", "")
        known = by_phrase(405, f"This path answers {allowed}, not {request.method}.", "method_not_allowed")
    else:
        known = by_phrase(error.status_code, str(error.detail), "http_error")
    return error_response(known, dict(error.headers or {}))
