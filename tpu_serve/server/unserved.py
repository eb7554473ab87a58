"""Paths that clients of other servers ask for and that this one does not serve: each answers 501 and says what to do instead."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from tpu_serve.server.errors import not_served

_NO_EMBEDDINGS = (
    "This server generates text; it makes no embeddings, scores or classes. Use a server for embedding models."
)
_NO_AUDIO = "This server generates text from text; it neither hears nor speaks."
_NO_BATCHES = "Batches are run from files: `tpu-serve run-batch -i in.jsonl -o out.jsonl` takes the same lines."
_NO_SLEEP = (
    "This server cannot unload its weights while it runs; stop the process, and start it again when it is needed."
)
_NO_ADAPTERS = "This server serves one set of weights; merge the adapter into the checkpoint and serve that."
_NO_PAUSE = "Generation cannot be paused; a request ends when its client closes the connection."
_NO_STORE = "Nothing is stored between requests; send the whole conversation to /v1/chat/completions."

UNSERVED: dict[str, str] = {
    **dict.fromkeys(
        (
            "/v1/embeddings",
            "/v2/embed",
            "/embed",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
            "/v1/moderations",
        ),
        _NO_EMBEDDINGS,
    ),
    **dict.fromkeys(("/v1/audio/{rest:path}", "/v1/realtime"), _NO_AUDIO),
    **dict.fromkeys(("/v1/images/{rest:path}", "/v1/videos"), "This server generates text, no pictures."),
    **dict.fromkeys(("/v1/batches", "/v1/batches/{rest:path}", "/v1/files", "/v1/files/{rest:path}"), _NO_BATCHES),
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _NO_SLEEP),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _NO_ADAPTERS),
    **dict.fromkeys(("/pause", "/resume", "/abort_requests", "/abort_request", "/pause_generation"), _NO_PAUSE),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/threads/{rest:path}", "/v1/conversations"), _NO_STORE),
    "/v1/chat/completions/batch": "Send each conversation as a request of its own to /v1/chat/completions; they share steps anyway.",
    "/v1/messages": "This server speaks the OpenAI API: send the messages to /v1/chat/completions.",
    "/v1/messages/count_tokens": "Send the messages to /tokenize, which counts their tokens.",
    "/v1/fine_tuning/{rest:path}": "This server does not train.",
    "/generate": "Send the text as prompt to /v1/completions.",
    "/get_model_info": "GET /v1/models says which model is served, and /server_info how.",
    "/get_server_info": "GET /server_info says how the server runs.",
}
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def add_unserved(app: FastAPI) -> None:
    """Adds a route for each; they are no part of the document that describes the server."""

    def add(path: str, hint: str) -> None:
        async def refuse(request: Request) -> Response:
            raise not_served(f"{request.url.path} is not served. {hint}")

        app.add_api_route(path, refuse, methods=_METHODS, include_in_schema=False)

    for path, hint in UNSERVED.items():
        add(path, hint)
