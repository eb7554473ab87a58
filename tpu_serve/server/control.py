"""Endpoints for operators: the prefix cache, traces, and the tokenizer's settings."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response

from tpu_serve.server import openapi
from tpu_serve.server.body import json_response
from tpu_serve.server.errors import HttpError, conflict, not_served
from tpu_serve.server.replies import SuccessReply
from tpu_serve.server.state import ServerState

if TYPE_CHECKING:
    from tpu_serve.engine.profiler import Profiler

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
    folder = state.config.profile_dir
    made: list[Profiler] = []

    def require() -> Profiler:
        if folder is None:
            raise not_served("Start the server with --profile-dir DIR to take traces.")
        state.require_service()
        if not made:
            from tpu_serve.engine.profiler import Profiler  # imports jax, which is there once the model is loaded

            made.append(Profiler(folder))
        return made[0]

    async def start_profile() -> Response:
        taker = require()
        try:
            is_started = await asyncio.to_thread(taker.start)
        except (OSError, RuntimeError):
            logger.exception("The trace could not be started")
            raise HttpError(
                500, "The trace could not be started; the server's log says why.", "profile_failed"
            ) from None
        if not is_started:
            raise conflict("A trace is being taken already; end it by POST /stop_profile.", "profile_running")
        logger.info("Taking a trace for %s", taker.folder)
        return Response()

    async def stop_profile() -> Response:
        taker = require()
        if not await asyncio.to_thread(taker.stop):
            raise conflict("No trace is being taken; start one by POST /start_profile.", "profile_not_running")
        logger.info("A trace is in %s", taker.folder)
        return Response()

    for path, work in (("/start_profile", start_profile), ("/stop_profile", stop_profile)):
        app.add_api_route(path, work, methods=["POST"], operation_id=path[1:], **openapi.PROFILE)
