"""Endpoints for operators: the prefix cache, traces, and the tokenizer's settings."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from fastapi import FastAPI, Response

from tpu_serve.engine.client import EngineDead
from tpu_serve.engine.operations import Operation
from tpu_serve.server import openapi
from tpu_serve.server.body import json_response
from tpu_serve.server.errors import HttpError, conflict, not_served
from tpu_serve.server.replies import SuccessReply
from tpu_serve.server.state import ServerState

logger = logging.getLogger(__name__)


def add_control(app: FastAPI, state: ServerState) -> None:
    """Adds them; those that need an option are there without it too, and name it."""

    async def reset_prefix_cache() -> Response:
        return json_response({"success": await state.require_service().frontend.reset_prefix_cache()})

    app.add_api_route(
        "/reset_prefix_cache",
        reset_prefix_cache,
        methods=["POST"],
        operation_id="reset_prefix_cache",
        response_model=SuccessReply,
        responses=openapi.STATE_ERRORS,
    )
    # The name that users of SGLang know.
    app.add_api_route("/flush_cache", reset_prefix_cache, methods=["GET", "POST"], include_in_schema=False)

    @app.get("/tokenizer_info", operation_id="tokenizer_info", **openapi.TOKENIZER_INFO)
    async def tokenizer_info() -> Response:
        if not state.config.enable_tokenizer_info_endpoint:
            raise not_served("Start the server with --enable-tokenizer-info-endpoint to show the tokenizer's settings.")
        tokenizer = state.require_service().tokenizer
        return json_response({**tokenizer.settings, "chat_template": tokenizer.chat_template_source})

    _add_profile(app, state)


def _add_profile(app: FastAPI, state: ServerState) -> None:
    def require() -> str:
        if state.config.profile_dir is None:
            raise not_served("Start the server with --profile-dir DIR to take traces.")
        state.require_service()
        return str(Path(state.config.profile_dir).expanduser())

    async def operate(name: Operation, *arguments: str) -> bool:
        engine = state.require_service().frontend.engine
        try:
            return bool(await asyncio.wrap_future(engine.operate(name, *arguments)))
        except EngineDead:
            raise
        except (OSError, RuntimeError):
            logger.exception("The trace could not be taken")
            raise HttpError(500, "The trace could not be taken; the server's log says why.", "profile_failed") from None

    async def start_profile() -> Response:
        folder = require()
        if not await operate("start_profile", folder):
            raise conflict("A trace is being taken already; end it by POST /stop_profile.", "profile_running")
        logger.info("Taking a trace for %s", folder)
        return Response()

    async def stop_profile() -> Response:
        folder = require()
        if not await operate("stop_profile"):
            raise conflict("No trace is being taken; start one by POST /start_profile.", "profile_not_running")
        logger.info("A trace is in %s", folder)
        return Response()

    for path, work in (("/start_profile", start_profile), ("/stop_profile", stop_profile)):
        app.add_api_route(path, work, methods=["POST"], operation_id=path[1:], **openapi.PROFILE)
