"""Endpoints that say how the server is: health, version, load, metrics, and what it runs."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from tpu_serve import __version__
from tpu_serve.server import openapi
from tpu_serve.server.body import json_response
from tpu_serve.server.info import server_info
from tpu_serve.server.metrics import CONTENT_TYPE
from tpu_serve.server.replies import HealthReply, LoadReply, ServerInfoReply, VersionReply
from tpu_serve.server.state import ServerState


def add_status(app: FastAPI, state: ServerState) -> None:
    """Adds them; HEAD is answered wherever GET is, see `Edge`."""
    _add_health(app, state)

    @app.get("/version", response_model=VersionReply, operation_id="version")
    async def show_version() -> Response:
        return json_response({"version": __version__})

    @app.get("/load", response_model=LoadReply, operation_id="load", responses=openapi.UNAUTHORIZED)
    async def load() -> Response:
        return json_response({"server_load": state.num_inference})

    @app.get("/server_info", response_model=ServerInfoReply, operation_id="server_info", responses=openapi.UNAUTHORIZED)
    async def show_info() -> Response:
        return json_response(await server_info(state))

    async def metrics() -> Response:
        return Response(state.metrics.text(), headers={"content-type": CONTENT_TYPE})

    app.add_api_route("/metrics", metrics, methods=["GET"], operation_id="metrics", responses=openapi.METRICS)
    app.add_api_route("/metrics/", metrics, methods=["GET"], include_in_schema=False)


def _add_health(app: FastAPI, state: ServerState) -> None:
    def respond(trouble: HealthReply | None) -> Response:
        return Response() if trouble is None else json_response(trouble.model_dump(exclude_none=True), 503)

    async def health(request: Request) -> Response:
        is_deep = request.query_params.get("deep", "").lower() in ("1", "true")
        return respond(await state.deep_health() if is_deep else state.health())

    async def deep_health() -> Response:
        return respond(await state.deep_health())

    app.add_api_route("/health", health, methods=["GET"], operation_id="health", **openapi.HEALTH)
    for method in ("GET", "POST"):
        name = f"ping_{method.lower()}"
        app.add_api_route("/ping", health, methods=[method], operation_id=name, **openapi.HEALTH)
    app.add_api_route(
        "/health_generate", deep_health, methods=["GET"], operation_id="health_generate", **openapi.DEEP_HEALTH
    )
