"""The edge of HTTP: keys, cross-origin requests, prefixes, slow clients, and limits of headers, bodies and queues."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import MAX_MODEL_LEN, FakeRunner, RawRequest, asynchronous, byte_tokenizer, parse_events, serving

from tpu_serve.config import ConfigError, ServerConfig
from tpu_serve.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@asynchronous
async def test_keys_of_a_file_and_metrics_without_one(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("one\n\n  two  \n")
    config = ServerConfig(api_key=("three",), api_key_file=str(keys), metrics_without_key=True)
    async with serving(config) as served:
        for key, status in (("one", 200), ("two", 200), ("three", 200), ("", 401), ("four", 401)):
            response = await served.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == status
        assert (await served.client.get("/metrics")).status_code == 200
        assert (await served.client.get("/metrics/")).status_code == 200
        assert (await served.client.get("/load")).status_code == 401


def test_files_of_keys_that_would_open_the_server(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--api-key-file .*none cannot be read"):
        _ = ServerConfig(api_key_file=str(tmp_path / "none")).api_keys
    empty = tmp_path / "empty"
    empty.write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no key: everyone could use the server"):
        _ = ServerConfig(api_key_file=str(empty)).api_keys


@asynchronous
async def test_pages_of_any_origin_may_ask_unless_told_otherwise():
    origin = {"origin": "http://page.example"}
    async with serving(ServerConfig(api_key=("key",))) as served:
        response = await served.client.options(COMPLETIONS, headers={**origin, **PREFLIGHT})
        assert response.status_code == 200, "browsers ask first, without the key"
        assert response.headers["access-control-allow-origin"] == "*"
        response = await served.client.post(COMPLETIONS, json={"prompt": "hi"}, headers=origin)
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "*", "the page can read the refusal"
        assert "x-request-id" in response.headers["access-control-expose-headers"]


@asynchronous
async def test_pages_of_named_origins_only():
    config = ServerConfig(
        allowed_origins=('["http://a.example", "http://b.example"]',),
        allowed_methods=("GET", "POST"),
        allowed_headers=("authorization", "content-type"),
        allow_credentials=True,
    )
    async with serving(config) as served:
        for name, is_allowed in (("a", True), ("b", True), ("c", False)):
            origin = {"origin": f"http://{name}.example"}
            response = await served.client.options(COMPLETIONS, headers={**origin, **PREFLIGHT})
            assert response.status_code == (200 if is_allowed else 400)
            response = await served.client.get("/v1/models", headers=origin)
            assert response.headers.get("access-control-allow-origin") == (origin["origin"] if is_allowed else None)
        assert response.headers["access-control-allow-credentials"] == "true"
        other = {**PREFLIGHT, "access-control-request-method": "DELETE", "origin": "http://a.example"}
        assert (await served.client.options(COMPLETIONS, headers=other)).status_code == 400


@asynchronous
async def test_a_prefix_works_whether_the_proxy_strips_it_or_not_and_opens_nothing():
    async with serving(ServerConfig(root_path="/llm", api_key=("key",))) as served:
        for prefix in ("", "/llm"):
            for path, status in (("/health", 200), ("/v1/models", 401), ("/metrics", 401), ("/nope", 401)):
                assert (await served.client.get(prefix + path)).status_code == status
            headers = {"authorization": "Bearer key"}
            assert (await served.client.get(f"{prefix}/v1/models", headers=headers)).status_code == 200
            response = await served.post(f"{prefix}{COMPLETIONS}", {"prompt": "hi", "max_tokens": 1}, **headers)
            assert response.status_code == 200
        for path in ("/llm/llm/health", "/llmhealth", "/health/", "/llm/health/x", "//health"):
            assert (await served.client.get(f"http://test{path}")).status_code == 401
        document = (await served.client.get("/llm/openapi.json", headers=headers)).json()
        assert document["servers"] == [{"url": "/llm"}]


@asynchronous
async def test_too_many_headers():
    async with serving(ServerConfig(h11_max_header_count=20)) as served:
        own = len(served.client.build_request("GET", "/load").headers.raw)
        for num_extra, status in ((20 - own, 200), (21 - own, 431)):
            headers = {f"x-{index}": "1" for index in range(num_extra)}
            response = await served.client.get("/load", headers=headers)
            assert response.status_code == status
        assert response.json()["error"]["reason"] == "too_many_headers"
        assert "21 headers" in response.json()["error"]["message"]


@asynchronous
async def test_request_ids_in_and_out():
    async with serving() as served:
        for given, expected in (("mine-1", "mine-1"), ("a\tb", "ab"), ("x" * 10_000, "x" * 128)):
            response = await served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1}, **{"x-request-id": given})
            assert response.headers["x-request-id"] == expected
            assert response.json()["id"] == f"cmpl-{expected}"
    async with serving(ServerConfig(enable_request_id_headers=False)) as served:
        response = await served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1}, **{"x-request-id": "mine"})
        assert "x-request-id" not in response.headers
        assert response.json()["id"] == "cmpl-mine"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/invocations"])
@asynchronous
async def test_a_body_that_stalls_is_given_up(path: str):
    async with serving(ServerConfig(body_timeout=0.2)) as served:
        request = RawRequest(served.app, path, b"")
        request._incoming = [{"type": "http.request", "body": b'{"prompt', "more_body": True}]
        await asyncio.wait_for(request.task, 2)
        assert request.messages[0]["status"] == 408
        assert '"reason":"body_timeout"' in request.text
        assert "0.2 seconds (--body-timeout)" in request.text
        assert (b"connection", b"close") in request.messages[0]["headers"]
        assert served.state.num_inference == 0


@asynchronous
async def test_a_body_that_stalls_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tpu_serve.server.state.LAST_BODY", 0.1)
    async with serving() as served:
        requests = [RawRequest(served.app, path, b"") for path in (COMPLETIONS, "/tokenize")]
        for request in requests:
            request._incoming = [{"type": "http.request", "body": b'{"prompt', "more_body": True}]
        while served.state.num_inference == 0:
            await asyncio.sleep(0.001)
        started = time.monotonic()
        served.state.drain()
        for request in requests:
            await asyncio.wait_for(request.task, 2)
            assert request.messages[0]["status"] == 503
            assert '"reason":"server_shutting_down"' in request.text
        assert 0.05 < time.monotonic() - started < 1
        assert served.state.num_inference == 0


def text_of(chunks: list[dict[str, Any]]) -> str:
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@asynchronous
async def test_idle_streams_get_comments(path: str):
    runner = FakeRunner()
    body = {"messages": [USER], "prompt": "hi"}
    body = {key: value for key, value in body.items() if (key == "messages") == (path == CHAT)}
    async with serving(ServerConfig(sse_keep_alive_interval=0.03), runner=runner) as served:
        plain = (await served.post(path, {**body, "max_tokens": 4, "stream": True})).text
        assert ":" not in [line[0] for line in plain.splitlines() if line]
        runner.hangs.set()
        request = RawRequest(served.app, path, {**body, "max_tokens": 4, "stream": True})
        await request.until(lambda: request.text.count(": keep-alive\n\n") >= 3)
        runner.hangs.clear()
        await asyncio.wait_for(request.task, 5)
        assert request.text.endswith("data: [DONE]\n\n")
        events = "\n\n".join(line for line in request.text.split("\n\n") if not line.startswith(":"))
        assert text_of(parse_events(events)) == text_of(parse_events(plain)) != ""
        # a client that leaves during a pause frees everything all the same
        runner.hangs.set()
        request = RawRequest(served.app, path, {**body, "max_tokens": 4, "stream": True})
        await request.until(lambda: ": keep-alive" in request.text)
        request.gone.set()
        await asyncio.wait_for(request.task, 1)
        runner.hangs.clear()
        await served.idle()


@asynchronous
async def test_streams_get_no_comments_unless_asked_for():
    runner = FakeRunner(seconds=0.05)
    async with serving(runner=runner) as served:
        text = (await served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 3, "stream": True})).text
        assert "keep-alive" not in text


@pytest.mark.parametrize("status", [503, 429])
@asynchronous
async def test_a_full_queue_says_when_to_come_back(status: int, monkeypatch: pytest.MonkeyPatch):
    config = ServerConfig(queue_full_status=status)
    async with serving(config, max_num_queued=1, runner=FakeRunner(seconds=0.01)) as served:
        assert served.state.service is not None
        frontend = type(served.state.service.frontend)
        monkeypatch.setattr(frontend, "retry_after_seconds", property(lambda self: 2.3456))
        calls = [served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 20}) for _ in range(20)]
        refused = [response for response in await asyncio.gather(*calls) if response.status_code != 200]
        assert refused
        for response in refused:
            assert response.status_code == status
            assert response.json()["error"]["reason"] == "queue_full"
            assert response.json()["error"]["code"] == status
            assert response.json()["error"]["type"] == {503: "ServiceUnavailableError", 429: "RateLimitError"}[status]
            assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2346")
        await served.idle()


@asynchronous
async def test_prompts_that_can_never_wait_together_are_not_told_to_come_back():
    async with serving(max_num_queued_tokens=50, runner=FakeRunner(seconds=0.01)) as served:
        for fields in ({"prompt": ["x" * 20] * 3}, {"prompt": ["x" * 20] * 2, "n": 2}):
            response = await served.post(COMPLETIONS, {"max_tokens": 1, **fields})
            assert response.status_code == 400, response.text
            assert (response.json()["error"]["reason"], response.json()["error"]["param"]) == (
                "prompt_exceeds_queue",
                "prompt",
            )
        assert len((await served.complete(prompt=["x" * 20] * 2, max_tokens=1))["choices"]) == 2


@asynchronous
async def test_an_over_long_text_is_not_even_tokenised(monkeypatch: pytest.MonkeyPatch):
    async with serving() as served:
        longest = served.engine.tokenizer.characters_per_token
        assert longest == len("<|im_start|>")
        most = MAX_MODEL_LEN * longest
        for path, body, param in (
            (COMPLETIONS, {"prompt": "x" * (most + 1)}, "prompt"),
            (COMPLETIONS, {"prompt": ["a", "x" * (most + 1)]}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": "x" * most}]}, "messages"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(Tokenizer, "encode", lambda self, text, special: 1 / 0 if len(text) > 9 else [1])
                response = await served.post(path, body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert error["reason"] == "context_length_exceeded"
            assert error["message"].startswith(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.")
            assert f"at least {MAX_MODEL_LEN + (path == COMPLETIONS)}" in error["message"] or path == CHAT
        # one character less has to be looked at
        response = await served.post(COMPLETIONS, {"prompt": "x" * most})
        assert f"{most} input tokens" in response.json()["error"]["message"]
        kept = {"prompt": "x" * (2 * most), "max_tokens": 1, "truncate_prompt_tokens": 5}
        assert (await served.complete(**kept))["usage"]["prompt_tokens"] == 5
        response = await served.post("/tokenize", {"prompt": "x" * (most + 1)})
        assert response.json()["count"] == most + 1, "which checks no length"


def test_the_longest_token_is_not_known_of_every_tokenizer():
    tokenizer = byte_tokenizer()
    assert tokenizer.characters_per_token == 12
    # every word outside of the vocabulary is one token here, however long
    unknown = byte_tokenizer()._backend
    unknown.model.unk_token = "<|im_end|>"
    unknown.pre_tokenizer = None
    assert Tokenizer(unknown).characters_per_token is None


def test_options_of_the_edge_that_cannot_work():
    for options, message in (
        ({"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_ca_certs": "c"}, "need --ssl-certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 3}, "--ssl-cert-reqs must be 0, 1 or 2, got 3"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "--ssl-cert-reqs 2 needs --ssl-ca-certs"),
        ({"ssl_certfile": "c", "ssl_ca_certs": "a", "ssl_cert_reqs": 0}, "--ssl-ca-certs has no use"),
        ({"root_path": "llm"}, "--root-path must start with /"),
        ({"root_path": "/llm/"}, "--root-path must start with /"),
        ({"queue_full_status": 500}, "--queue-full-status must be 429 or 503, got 500"),
        ({"body_timeout": 0.0}, "--body-timeout must be positive"),
        ({"sse_keep_alive_interval": -1.0}, "--sse-keep-alive-interval must not be negative"),
        ({"h11_max_header_count": 0}, "--h11-max-header-count must be at least 1"),
        ({"allowed_origins": ("[1]",)}, "--allowed-origins must be words or a JSON list of strings"),
        ({"allowed_origins": ("[",)}, "--allowed-origins must be words or a JSON list of strings"),
    ):
        with pytest.raises(ConfigError) as refused:
            ServerConfig(**options)
        assert message in str(refused.value)
