"""What /openapi.json says of endpoints that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tpu_serve.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from tpu_serve.server.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    ErrorReply,
    HealthReply,
    TokenizeReply,
)
from tpu_serve.server.responses_protocol import ResponseRequest
from tpu_serve.server.responses_replies import ResponseEvent, ResponseReply

_STATUSES = {
    400: "The request cannot be served as asked",
    401: "The API key is wrong or missing",
    404: "The model does not exist",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "The server is busy, when it was told to say so by this status",
    500: "The server failed",
    503: "The server is loading, busy, draining or dead",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text} for status, text in _STATUSES.items()
}
UNAUTHORIZED: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}
STATE_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 500, 503)}
_DEEP = {"name": "deep", "in": "query", "description": "1: generate a token", "schema": {"enum": ["0", "1"]}}
DEEP_HEALTH: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"description": "Ready", "content": {}},
        503: {"model": HealthReply, "description": "Loading, draining, dead or stalled"},
    },
}
HEALTH: dict[str, Any] = {**DEEP_HEALTH, "openapi_extra": {"parameters": [_DEEP]}}
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
    **UNAUTHORIZED,
}
_NOT_SERVED: dict[int | str, dict[str, Any]] = {
    501: {"model": ErrorReply, "description": "The option that it needs was not given"}
}
PROFILE: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"description": "Done", "content": {}},
        409: {"model": ErrorReply, "description": "A trace is, or none is, being taken"},
        **STATE_ERRORS,
        **_NOT_SERVED,
    },
}
TOKENIZER_INFO: dict[str, Any] = {
    "responses": {
        200: {"description": "tokenizer_config.json", "content": {"application/json": {"schema": {"type": "object"}}}},
        **STATE_ERRORS,
        **_NOT_SERVED,
    }
}


_REFERENCE = "#/components/schemas/{model}"


def _document(requests: list[type[BaseModel]], reply: Any, streams: tuple[type[BaseModel], ...] = ()) -> dict[str, Any]:
    """Arguments of a route that say what it takes and gives; `complete` adds the schemas they point at."""
    answer: dict[str, Any] = {"model": reply, "description": "The answer"}
    if streams:
        answer["content"] = {"text/event-stream": {"schema": _reference(*streams)}}
        answer["description"] = "The answer; with stream = true, its chunks as events"
    return {
        "responses": {200: answer, **ERRORS},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(*requests)}}}
        },
    }


def _reference(*models: type[BaseModel]) -> dict[str, Any]:
    schemas = [{"$ref": _REFERENCE.format(model=model.__name__)} for model in models]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


CHAT = _document([ChatCompletionRequest], ChatReply, (ChatChunk,))
COMPLETION = _document([CompletionRequest], CompletionReply, (CompletionReply,))
RESPONSE = _document([ResponseRequest], ResponseReply, (ResponseEvent,))
INVOCATION = _document(
    [ChatCompletionRequest, CompletionRequest], ChatReply | CompletionReply, (ChatChunk, CompletionReply)
)
TOKENIZE = _document([TokenizeTextRequest, TokenizeChatRequest], TokenizeReply)
DETOKENIZE = _document([DetokenizeRequest], DetokenizeReply)
_REQUESTS = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponseRequest,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
_CHUNKS = (ChatChunk, ResponseEvent)


def complete(app: FastAPI) -> None:
    """Makes the application's document hold the schemas of request bodies and chunks, which the framework does not see."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        _, definitions = models_json_schema(
            [(model, "validation") for model in (*_REQUESTS, *_CHUNKS)], ref_template=_REFERENCE
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in definitions["$defs"].items():
            schemas.setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
