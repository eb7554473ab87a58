"""Endpoints beside inference: deep health, control, information, and what is not served."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeRunner, asynchronous, byte_tokenizer, letters, parse_events, serving

from tpu_serve import __version__
from tpu_serve.config import ServerConfig
from tpu_serve.server.unserved import UNSERVED
from tpu_serve.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@asynchronous
async def test_deep_health_generates_a_token():
    async with serving() as served:
        for path in ("/health?deep=1", "/health_generate", "/ping?deep=true"):
            before = served.runner.num_steps
            response = await served.client.get(path)
            assert (response.status_code, response.content) == (200, b"")
            assert served.runner.num_steps == before + 1
        before = served.runner.num_steps
        assert (await served.client.get("/health?deep=0")).status_code == 200
        assert served.runner.num_steps == before
        await served.idle()


@asynchronous
async def test_deep_health_finds_an_engine_that_stands_still():
    async with serving() as served:
        served.state.probe.patience = 0.2
        served.runner.hangs.set()
        assert (await served.client.get("/health")).status_code == 200
        many = await asyncio.gather(*[served.client.get("/health?deep=1") for _ in range(20)])
        served.runner.hangs.clear()
        for response in many:
            assert response.status_code == 503
            reason = "the engine generated nothing for 0.2 seconds"
            assert response.json() == {"status": "stalled", "reason": reason}
        await served.idle()
        metrics = (await served.client.get("/metrics")).text
        assert re.search(r'vllm:request_success_total\{[^}]*"abort"[^}]*\} 1\.0', metrics), "all share one question"
        assert (await served.client.get("/health?deep=1")).status_code == 200


@asynchronous
async def test_a_busy_engine_is_healthy():
    """Behind a full queue a token of one's own would take long; others' tokens are proof enough."""
    async with serving(runner=FakeRunner(seconds=0.01), max_num_queued=8) as served:
        work = []
        for queue in (served.engine.core.scheduler.running, served.engine.core.scheduler.waiting):
            body = {"prompt": "hi", "n": 8, "max_tokens": 100}
            work.append(asyncio.create_task(served.post(COMPLETIONS, body)))
            while len(queue) < 8:
                assert not work[-1].done()
                await asyncio.sleep(0.002)
        assert (await served.client.get("/health?deep=1")).status_code == 200
        assert not work[0].done(), "it waited for the others' answers"
        assert [response.status_code for response in await asyncio.gather(*work)] == [200, 200]


@asynchronous
async def test_deep_health_of_a_server_that_cannot_answer():
    async with serving(loading=True) as served:
        assert (await served.client.get("/health?deep=1")).json()["status"] == "loading"
        served.state.ready(served.engine)
        served.runner.failure = RuntimeError("the device is on fire")
        response = await served.client.get("/health?deep=1")
        assert response.status_code == 503
        assert response.json()["status"] == "dead"


@asynchronous
async def test_head_is_get_without_a_body():
    async with serving(ServerConfig(api_key=("key",))) as served:
        for path in ("/health", "/ping", "/version", "/v1/models", "/load", "/metrics", "/openapi.json", "/docs"):
            headers = {"authorization": "Bearer key"}
            got, head = [await served.client.request(way, path, headers=headers) for way in ("GET", "HEAD")]
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == got.headers["content-type"] if got.content else True
        assert (await served.client.head("/v1/models")).status_code == 401
        response = await served.client.head(COMPLETIONS, headers=headers)
        assert (response.status_code, response.headers["allow"], response.content) == (405, "POST", b"")


@asynchronous
async def test_server_info_says_everything_but_secrets(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("hidden-too\n")
    config = ServerConfig(api_key=("very-secret",), api_key_file=str(keys), strict_fields=True)
    async with serving(config, loading=True) as served:
        headers = {"authorization": "Bearer hidden-too"}
        assert (await served.client.get("/server_info")).status_code == 401
        info = (await served.client.get("/server_info", headers=headers)).json()
        assert (info["status"], info["engine"], info["devices"]) == ("loading", None, [])
        served.state.ready(served.engine)
        response = await served.client.get("/server_info", headers=headers)
        info = response.json()
        assert info["status"] == "ready"
        assert info["version"] == __version__
        assert info["models"] == ["tiny", "tiny-alias"]
        assert info["server_options"] == {"api_key": "[1 hidden]", "api_key_file": str(keys), "strict_fields": True}
        assert "secret" not in response.text
        assert "hidden-too" not in response.text
        assert re.match(r"\d+\.\d+", info["versions"]["jax"])
        engine = info["engine"]
        assert (engine["max_num_seqs"], engine["max_num_batched_tokens"], engine["page_size"]) == (8, 64, 8)
        assert engine["kv_pools"] == [{"num_pages": 129, "window": None}]
        assert engine["moe_plans"] == [{"path": "ragged", "source": "none", "num_buckets": 3}]


@asynchronous
async def test_the_prefix_cache_is_emptied():
    async with serving() as served:
        prompt = "the same beginning of every prompt, several pages long"
        await served.complete(prompt=prompt, max_tokens=1)
        usage = (await served.complete(prompt=prompt, max_tokens=1))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 48
        for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/flush_cache"), ("POST", "/flush_cache")):
            response = await served.client.request(method, path)
            assert response.json() == {"success": True}
            usage = (await served.complete(prompt=prompt, max_tokens=1))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@asynchronous
async def test_traces_are_taken_one_at_a_time(tmp_path: Path):
    async with serving() as served:
        response = await served.client.post("/start_profile")
        assert response.status_code == 501
        assert "--profile-dir" in response.json()["error"]["message"]
    folder = tmp_path / "traces"
    async with serving(ServerConfig(profile_dir=str(folder))) as served:
        for path, status, reason in (
            ("/stop_profile", 409, "profile_not_running"),
            ("/start_profile", 200, None),
            ("/start_profile", 409, "profile_running"),
            ("/stop_profile", 200, None),
            ("/stop_profile", 409, "profile_not_running"),
        ):
            response = await served.client.post(path)
            assert response.status_code == status, response.text
            assert (response.json()["error"]["reason"] if reason else None) == reason
        assert list(folder.rglob("*.xplane.pb"))
        await served.complete(max_tokens=1)


@asynchronous
async def test_a_trace_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    blocked = tmp_path / "file"
    blocked.write_text("")
    async with serving(ServerConfig(profile_dir=str(blocked))) as served:
        response = await served.client.post("/start_profile")
        assert response.status_code == 500
        assert response.json()["error"]["reason"] == "profile_failed"
        assert str(tmp_path) not in response.text
        assert str(blocked) in caplog.text


@asynchronous
async def test_tokenizer_info():
    async with serving() as served:
        response = await served.client.get("/tokenizer_info")
        assert response.status_code == 501
        assert "--enable-tokenizer-info-endpoint" in response.json()["error"]["message"]
    async with serving(ServerConfig(enable_tokenizer_info_endpoint=True)) as served:
        settings = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 4096}
        served.engine.tokenizer.settings.update(settings)
        info = (await served.client.get("/tokenizer_info")).json()
        assert info == {**settings, "chat_template": served.engine.tokenizer.chat_template_source}


def test_the_settings_of_a_tokenizer_are_its_file(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer()._backend.to_str())
    settings = {"tokenizer_class": "X", "added": {"1": "a"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.load(tmp_path).settings == settings


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_invocations_are_what_their_body_is(stream: bool):
    async with serving() as served:
        for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "hi"})):
            texts = []
            for where in (path, "/invocations"):
                response = await served.post(where, {**body, "max_tokens": 5, "stream": stream})
                assert response.status_code == 200
                events = parse_events(response.text) if stream else [response.json()]
                choices = [choice for event in events for choice in event["choices"]]
                texts.append([choice.get("text", choice.get("message", choice.get("delta"))) for choice in choices])
            assert texts[0] == texts[1]
        for body, param in (({"input": "hi"}, "messages"), ({}, "messages"), ([], None), ("x", None)):
            response = await served.post("/invocations", body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


@asynchronous
async def test_what_is_not_served_says_what_to_do_instead():
    async with serving() as served:
        for path, hint in UNSERVED.items():
            for method in ("GET", "POST", "DELETE"):
                response = await served.client.request(method, path.replace("{rest:path}", "speech/x"))
                error = response.json()["error"]
                assert response.status_code == 501
                assert (error["type"], error["reason"]) == ("NotImplementedError", "not_served")
                assert hint in error["message"]
                assert response.headers["x-should-retry"] == "false", "or the openai client tries three times"
        schema = (await served.client.get("/openapi.json")).json()
        assert not set(schema["paths"]) & set(UNSERVED)


def references(value: Any) -> list[str]:
    """Every $ref of a document."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in ([item] if key == "$ref" else references(item))]
    return [text for item in value for text in references(item)] if isinstance(value, list) else []


@asynchronous
async def test_the_document_is_whole():
    async with serving() as served:
        document = (await served.client.get("/openapi.json")).json()
        for reference in references(document):
            assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
        names = [value["operationId"] for methods in document["paths"].values() for value in methods.values()]
        assert len(set(names)) == len(names)
        for path in (CHAT, COMPLETIONS, "/invocations"):
            content = document["paths"][path]["post"]["responses"]["200"]["content"]
            assert set(content) == {"application/json", "text/event-stream"}
            assert all(references(entry) for entry in content.values())
        for path, methods in document["paths"].items():
            for value in methods.values():
                is_open = path in ("/health", "/health_generate", "/ping", "/version")
                assert ("401" in value["responses"]) == (not is_open), path
                assert value["responses"]["200"].get("content") != {"application/json": {"schema": {}}}, path


@asynchronous
async def test_the_page_of_endpoints_needs_no_network():
    async with serving() as served:
        page = await served.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert not re.findall(r"https?://", page.text)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert 'fetch("openapi.json")' in page.text
    async with serving(ServerConfig(disable_fastapi_docs=True)) as served:
        for path in ("/docs", "/openapi.json"):
            assert (await served.client.get(path)).status_code == 404


@pytest.mark.parametrize("form", ["text", "json", "JSON"])
@asynchronous
async def test_gateways_are_told_the_load(form: str):
    async with serving() as served:
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
            for stream in (False, True):
                body = {**body, "max_tokens": 3, "stream": stream}
                response = await served.post(path, body, **{"endpoint-load-metrics-format": form})
                kind, _, report = response.headers["endpoint-load-metrics"].partition(" ")
                assert kind == form.upper()
                if kind == "TEXT":
                    pairs = dict(item.split("=") for item in report.split(", "))
                else:
                    pairs = {f"named_metrics.{name}": v for name, v in json.loads(report)["named_metrics"].items()}
                assert set(pairs) == {"named_metrics.kv_cache_usage_perc", "named_metrics.num_requests_waiting"}
                assert 0 <= float(pairs["named_metrics.kv_cache_usage_perc"]) < 1
        for other in ("", "xml"):
            response = await served.post(path, body, **{"endpoint-load-metrics-format": other})
            assert "endpoint-load-metrics" not in response.headers


@asynchronous
async def test_equal_request_ids_at_the_same_time():
    async with serving(runner=FakeRunner(letters, seconds=0.002)) as served:
        body = {"prompt": "hi", "max_tokens": 20}
        by_body = [served.post(COMPLETIONS, {**body, "request_id": "same"}) for _ in range(2)]
        by_header = [served.post(COMPLETIONS, body, **{"x-request-id": "same"}) for _ in range(2)]
        responses = await asyncio.gather(*by_body, *by_header)
        assert [response.status_code for response in responses] == [200] * 4
        assert {response.headers["x-request-id"] for response in responses} == {"same"}
        assert len({response.json()["choices"][0]["text"] for response in responses}) == 1
        await served.idle()
