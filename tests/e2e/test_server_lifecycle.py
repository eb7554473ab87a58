"""Loading, ready, draining, dead; clients that leave; and the edges of HTTP: keys, sizes, paths."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import FakeRunner, RawRequest, Served, asynchronous, parse_events, serving

from tpu_serve.config import ServerConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
BODIES = ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]}))


@asynchronous
async def test_while_loading():
    async with serving(loading=True) as served:
        served.state.set_phase("weights", 0.426)
        response = await served.client.get("/health")
        assert response.status_code == 503
        assert response.json() == {"status": "loading", "phase": "weights", "percent": 43}
        for path, body in (*BODIES, ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            response = await served.post(path, body)
            assert response.status_code == 503
            assert response.json()["error"]["reason"] == "model_loading"
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
            assert "weights 43%" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0
        cards = (await served.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", None), ("tiny-alias", None)]
        assert (await served.client.get("/version")).status_code == 200
        assert (await served.client.get("/load")).json() == {"server_load": 0}
        assert "vllm:num_requests_running" in (await served.client.get("/metrics")).text
        served.state.ready(served.engine)
        assert (await served.client.get("/health")).status_code == 200
        await served.complete(max_tokens=1)


@asynchronous
async def test_when_ready():
    async with serving() as served:
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            response = await served.client.request(method, path)
            assert (response.status_code, response.content) == (200, b"")
        assert (await served.client.get("/version")).json() == {"version": served.app.version}
        listing = (await served.client.get("/v1/models")).json()
        assert listing["object"] == "list"
        card = listing["data"][0]
        assert (card["id"], card["object"], card["root"], card["parent"]) == ("tiny", "model", "fake/root", None)
        assert card["max_model_len"] == 256
        assert card["permission"][0]["object"] == "model_permission"
        assert (await served.client.get("/v1/models/tiny")).json() == card
        served.state.names = ("org/model",)
        assert (await served.client.get("/v1/models/org/model")).json()["id"] == "org/model"


@asynchronous
async def test_the_documentation_describes_bodies_and_streams():
    async with serving() as served:
        document = (await served.client.get("/openapi.json")).json()
        assert (await served.client.get("/docs")).status_code == 200
    names = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(document)))
    assert names
    for name in names:
        assert name.startswith("#/components/schemas/")
        assert name.rsplit("/", 1)[1] in document["components"]["schemas"]
    for path, stream in ((COMPLETIONS, "CompletionReply"), (CHAT, "ChatChunk")):
        operation = document["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("Request")
        content = operation["responses"]["200"]["content"]
        assert content["text/event-stream"]["schema"]["$ref"].endswith(stream)
        assert content["application/json"]["schema"]["$ref"].endswith("Reply")
        assert operation["responses"]["503"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorReply")


@asynchronous
async def test_draining_finishes_what_runs_and_refuses_the_rest():
    async with serving(runner=FakeRunner(seconds=0.005)) as served:
        running = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 20}))
        await until_running(served, 1)
        served.state.drain()
        for path, body in BODIES:
            response = await served.post(path, body)
            assert response.status_code == 503
            assert response.json()["error"]["reason"] == "server_shutting_down"
            assert "retry-after" in response.headers
        health = await served.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        response = await running
        assert response.json()["usage"]["completion_tokens"] == 20


@asynchronous
async def test_closing_the_engine_tells_every_client():
    await check_last_words(lambda served: asyncio.to_thread(served.state.service.frontend.close))


@asynchronous
async def test_aborting_everything_does_not_wait_for_the_engine():
    async def abort(served: Served) -> None:
        served.runner.hangs.set()
        await asyncio.sleep(0.05)
        served.state.service.frontend.abort_all()
        await asyncio.sleep(0.05)
        assert served.state.num_inference == 0
        served.runner.hangs.clear()
        await served.idle()

    await check_last_words(abort)


async def check_last_words(end: Callable[[Served], Awaitable[None]]) -> None:
    async with serving(runner=FakeRunner(seconds=0.005)) as served:
        whole = asyncio.create_task(served.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 200}))
        stream = asyncio.create_task(served.events(CHAT, messages=[USER], max_tokens=200))
        await until_running(served, 3)
        await end(served)
        response = await whole
        assert response.status_code == 503
        assert response.json()["error"]["reason"] == "server_shutting_down"
        assert (await stream)[-1]["error"]["reason"] == "server_shutting_down"
        assert served.state.num_inference == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [*BODIES, (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2})])
@asynchronous
async def test_a_client_that_leaves_frees_everything_at_once(path: str, body: dict[str, Any], stream: bool):
    async with serving(runner=FakeRunner(seconds=0.002)) as served:
        request = RawRequest(served.app, path, {**body, "max_tokens": 250, "stream": stream})
        await until_running(served, 1)
        if stream:
            await request.until(lambda: request.text.count("data: ") > 6)
        assert (await served.client.get("/load")).json() == {"server_load": 1}
        request.gone.set()
        await asyncio.wait_for(request.task, 1)
        await served.idle(1.0)
        assert "[DONE]" not in request.text
        metrics = (await served.client.get("/metrics")).text
        num_choices = len(body["prompt"]) * 2 if "n" in body else 1
        assert (
            f'request_success_total{{engine="0",finished_reason="abort",model_name="tiny"}} {num_choices}.0' in metrics
        )
        assert re.search(r"vllm:num_requests_running\{.*\} 0\.0", metrics)
        assert re.search(r"vllm:kv_cache_usage_perc\{.*\} 0\.0", metrics)


@asynchronous
async def test_a_client_that_leaves_before_its_body_has_come():
    async with serving() as served:
        request = RawRequest(served.app, COMPLETIONS, {"prompt": "hi"})
        request._incoming = [{"type": "http.request", "body": b'{"prompt', "more_body": True}]
        request.gone.set()
        await asyncio.wait_for(request.task, 1)
        assert request.messages == []
        assert served.state.num_inference == 0


@asynchronous
async def test_a_dead_engine(caplog: pytest.LogCaptureFixture):
    async with serving(runner=FakeRunner(seconds=0.005)) as served:
        whole = asyncio.create_task(served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 200}))
        stream = RawRequest(served.app, CHAT, {"messages": [USER], "max_tokens": 200, "stream": True})
        many = asyncio.create_task(served.events(COMPLETIONS, prompt=["a", "b"], max_tokens=200))
        await until_running(served, 4)
        await stream.until(lambda: "content" in stream.text)
        served.runner.failure = RuntimeError("/secret/path.py is on fire")
        response = await asyncio.wait_for(whole, 2)
        assert response.status_code == 500
        assert response.json()["error"]["reason"] == "engine_failed"
        assert response.json()["error"]["type"] == "InternalServerError"
        await asyncio.wait_for(stream.task, 2)
        events = parse_events(stream.text)
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert [list(event) == ["error"] for event in events] == [False] * (len(events) - 1) + [True]
        assert (await asyncio.wait_for(many, 2))[-1]["error"]["code"] == 500
        assert "secret" not in response.text + stream.text
        assert "secret" in caplog.text
        health = await served.client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        for path, body in BODIES:
            response = await served.post(path, body)
            assert response.status_code == 503
            assert response.json()["error"]["reason"] == "engine_failed"
        assert (await served.client.get("/v1/models")).status_code == 200
        assert 'finished_reason="error",model_name="tiny"} 4.0' in (await served.client.get("/metrics")).text


@asynchronous
async def test_one_request_without_a_number_to_sample_from_fails_alone():
    """The device reports id -1 where the logits of a row hold a NaN."""
    bad = ord("!")
    runner = FakeRunner(lambda request, index: -1 if request.prompt_token_ids[0] == bad and index == 2 else ord("a"))
    async with serving(runner=runner) as served:
        failed, fine = await asyncio.gather(
            served.post(COMPLETIONS, {"prompt": "!", "max_tokens": 9}),
            served.post(COMPLETIONS, {"prompt": "?", "max_tokens": 9}),
        )
        assert failed.status_code == 500
        assert failed.json()["error"]["reason"] == "request_failed"
        assert "not a number" in failed.json()["error"]["message"]
        assert fine.json()["choices"][0]["text"] == "a" * 9
        streamed = await served.post(COMPLETIONS, {"prompt": "!", "max_tokens": 9, "stream": True})
        *pieces, error = parse_events(streamed.text)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "aa"
        assert error["error"]["reason"] == "request_failed"
        assert (await served.client.get("/health")).status_code == 200


@asynchronous
async def test_api_keys():
    config = ServerConfig(api_key=("first-key", "second-key"))
    async with serving(config) as served:
        for path in ("/health", "/ping", "/version"):
            assert (await served.client.get(path)).status_code == 200
        for method, path in (
            ("POST", COMPLETIONS),
            ("POST", CHAT),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("GET", "/metrics"),
            ("GET", "/load"),
            ("GET", "/openapi.json"),
            ("GET", "/docs"),
            ("GET", "/nope"),
        ):
            for authorization in (
                None,
                "Bearer wrong",
                "Bearer ",
                "first-key",
                "Basic first-key",
                "Bearer first-keyx",
                "Bearer é",
            ):
                headers = {} if authorization is None else {"authorization": authorization.encode()}
                response = await served.client.request(method, path, headers=headers)
                assert response.status_code == 401, (path, authorization)
                error = response.json()["error"]
                assert error.pop("message")
                assert error == {
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_api_key",
                    "reason": "invalid_api_key",
                }
                assert response.headers["www-authenticate"] == "Bearer"
        for authorization in ("Bearer first-key", "bearer second-key", "BEARER  first-key "):
            response = await served.post(COMPLETIONS, {"prompt": "hi"}, authorization=authorization)
            assert response.status_code == 200


@asynchronous
async def test_bodies_that_are_too_large_are_not_read():
    async with serving(ServerConfig(max_request_bytes=1000)) as served:
        fits = json.dumps({"prompt": "hi"}).ljust(1000)
        response = await served.client.post(COMPLETIONS, content=fits, headers={"content-type": "application/json"})
        assert response.status_code == 200
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            response = await served.client.post(path, content=fits + " ", headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert response.json()["error"]["reason"] == "request_too_large"
            assert response.json()["error"]["type"] == "Content Too Large"
        # without a declared length the body is refused as soon as it is over the limit
        request = RawRequest(served.app, COMPLETIONS, b"")
        request._incoming = [{"type": "http.request", "body": b" " * 400, "more_body": True} for _ in range(10)]
        await asyncio.wait_for(request.task, 1)
        assert request.messages[0]["status"] == 413
        assert len(request._incoming) == 7


async def until_running(served: Served, count: int) -> None:
    for _ in range(1000):
        if len(served.engine.core.scheduler.running) >= count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the requests do not run")
