"""What /openapi.json says of endpoints that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
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

_STATUSES = {
    400: "The request cannot be served as asked",
    401: "The API key is wrong or missing",
    404: "The model does not exist",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    500: "The server failed",
    503: "The server is loading, busy, draining or dead",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text} for status, text in _STATUSES.items()
}
HEALTH: dict[int | str, dict[str, Any]] = {
    200: {"description": "Ready", "content": {}},
    503: {"model": HealthReply, "description": "Loading, draining or dead"},
}
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


_REFERENCE = "#/components/schemas/{model}"


def _document(
    requests: list[type[BaseModel]], reply: type[BaseModel], stream: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Arguments of a route that say what it takes and gives; `complete` adds the schemas they point at."""
    schemas = [_reference(request) for request in requests]
    body = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    answer: dict[str, Any] = {"model": reply, "description": "The answer"}
    if stream is not None:
        answer["content"] = {"text/event-stream": {"schema": _reference(stream)}}
        answer["description"] = "The answer; with stream = true, its chunks as events"
    return {
        "responses": {200: answer, **ERRORS},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=model.__name__)}


CHAT = _document([ChatCompletionRequest], ChatReply, ChatChunk)
COMPLETION = _document([CompletionRequest], CompletionReply, CompletionReply)
TOKENIZE = _document([TokenizeTextRequest, TokenizeChatRequest], TokenizeReply)
DETOKENIZE = _document([DetokenizeRequest], DetokenizeReply)
_REQUESTS = (ChatCompletionRequest, CompletionRequest, TokenizeTextRequest, TokenizeChatRequest, DetokenizeRequest)


def complete(app: FastAPI) -> None:
    """Makes the application's document hold the schemas of request bodies and chunks, which the framework does not see."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        _, definitions = models_json_schema(
            [(model, "validation") for model in (*_REQUESTS, ChatChunk)], ref_template=_REFERENCE
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name, schema in definitions["$defs"].items():
            schemas.setdefault(name, schema)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
