"""The HTTP application: which path is answered by what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tpu_serve import __version__
from tpu_serve.config import ServerConfig
from tpu_serve.request import InvalidRequest
from tpu_serve.server import models, openapi
from tpu_serve.server.answer import Start
from tpu_serve.server.body import error_response, json_response, read_json
from tpu_serve.server.chat import start_chat
from tpu_serve.server.completions import start_completion
from tpu_serve.server.errors import HttpError, by_phrase
from tpu_serve.server.exchange import Exchange
from tpu_serve.server.metrics import CONTENT_TYPE
from tpu_serve.server.middleware import Edge
from tpu_serve.server.parameters import ignored_header
from tpu_serve.server.replies import LoadReply, ModelCard, ModelList, VersionReply
from tpu_serve.server.service import Service, check_model
from tpu_serve.server.state import ServerState
from tpu_serve.server.tokenization import detokenize, tokenize


def create_app(config: ServerConfig, state: ServerState) -> FastAPI:
    """The application over a state, which may still be loading."""
    app = FastAPI(title="tpu-serve", version=__version__, redirect_slashes=False, redoc_url=None)
    app.add_middleware(Edge, metrics=state.metrics, api_keys=config.api_keys)
    for kind in (InvalidRequest, HttpError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_inference(app, state)
    _add_text(app, state)
    _add_models(app, state)
    _add_status(app, state)
    openapi.complete(app)
    return app


def _add_inference(app: FastAPI, state: ServerState) -> None:
    def add(path: str, start: Start, document: dict[str, Any]) -> None:
        async def answer(request: Request) -> Response:
            return Exchange(state, start)

        app.add_api_route(path, answer, methods=["POST"], operation_id=path.strip("/").replace("/", "_"), **document)

    add("/v1/chat/completions", start_chat, openapi.CHAT)
    add("/v1/completions", start_completion, openapi.COMPLETION)


def _add_text(app: FastAPI, state: ServerState) -> None:
    Work = Callable[[Any, Service], Awaitable[tuple[dict[str, Any], tuple[str, ...]]]]  # noqa: N806

    def add(path: str, work: Work, document: dict[str, Any]) -> None:
        async def answer(request: Request) -> Response:
            service = state.require_service()
            try:
                body = await read_json(request.scope, request.receive, state.config.max_request_bytes)
            except ClientDisconnect:
                return Response()
            reply, ignored = await work(body, service)
            return json_response(reply, headers=ignored_header(ignored))

        app.add_api_route(path, answer, methods=["POST"], operation_id=path.strip("/"), **document)

    add("/tokenize", tokenize, openapi.TOKENIZE)
    add("/detokenize", detokenize, openapi.DETOKENIZE)


def _add_models(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        return json_response(models.model_list(state))

    @app.get("/v1/models/{id:path}", response_model=ModelCard, responses=openapi.ERRORS)
    async def show_model(id: str) -> Response:
        check_model(id, state.names)
        return json_response(models.model_card(state, id))


def _add_status(app: FastAPI, state: ServerState) -> None:
    async def health() -> Response:
        trouble = state.health()
        return Response() if trouble is None else json_response(trouble.model_dump(exclude_none=True), 503)

    app.add_api_route("/health", health, methods=["GET"], operation_id="health", responses=openapi.HEALTH)
    for method in ("GET", "POST"):
        name = f"ping_{method.lower()}"
        app.add_api_route("/ping", health, methods=[method], operation_id=name, responses=openapi.HEALTH)

    @app.get("/version", response_model=VersionReply)
    async def show_version() -> Response:
        return json_response({"version": __version__})

    @app.get("/load", response_model=LoadReply)
    async def load() -> Response:
        return json_response({"server_load": state.num_inference})

    async def metrics() -> Response:
        return Response(state.metrics.text(), headers={"content-type": CONTENT_TYPE})

    app.add_api_route("/metrics", metrics, methods=["GET"], operation_id="metrics", responses=openapi.METRICS)
    app.add_api_route("/metrics/", metrics, methods=["GET"], include_in_schema=False)


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
