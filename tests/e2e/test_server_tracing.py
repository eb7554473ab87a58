"""Traces: one span for each prompt, sent to a collector that may be anything."""

import asyncio
import contextlib
import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import FakeRunner, RawRequest, Served, asynchronous, saying, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tpu_serve.config import ConfigError, EngineConfig, ServerConfig
from tpu_serve.server.run import serve
from tpu_serve.server.tracing import Tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes traces over HTTP, on a port of its own; answers `status`."""

    def __init__(self, status: int):
        collector = self
        self.bodies: list[bytes] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    @property
    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextlib.contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    collector = Collector(status)
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


async def end(served: Served) -> None:
    await served.idle()
    assert served.state.tracing is not None
    await asyncio.to_thread(served.state.tracing.close)


def attributes(span: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(item) for item in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {item.key: value(item.value) for item in span.attributes}


@asynchronous
async def test_a_span_says_what_was_asked_and_how_it_went():
    with collecting() as collector:
        config = ServerConfig(otlp_traces_endpoint=collector.endpoint)
        async with serving(config, runner=FakeRunner(seconds=0.01)) as served:
            response = await served.post(
                "/v1/completions",
                {"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "n": 2, "temperature": 0.5, "top_p": 0.75},
                traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01",
                **{"X-Request-Id": "mine"},
            )
            assert response.status_code == 200
            await end(served)
        (span,) = collector.spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE_ID, PARENT_ID)
    told = attributes(span)
    times = {name: told.pop(name) for name in list(told) if name.startswith("gen_ai.latency.")}
    assert told == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.cached_tokens": 0,
        "gen_ai.usage.num_sequences": 2,
    }
    queue, first, prefill, decode, inference, whole = (
        times.pop(f"gen_ai.latency.{name}")
        for name in (
            "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode",
            "time_in_model_inference", "e2e",
        )
    )  # fmt: skip
    assert times == {}
    assert queue >= 0
    assert prefill >= 0.01
    assert 0.01 <= first <= queue + prefill + 1e-6  # of the choice that had it first, and of the slowest ones
    assert decode >= 0.04
    assert decode < inference <= prefill + decode + 1e-6
    assert first + decode <= whole
    assert abs((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 - whole) < 0.5


@asynchronous
async def test_every_prompt_has_a_span_whatever_ends_it():
    with collecting() as collector:
        config = ServerConfig(otlp_traces_endpoint=collector.endpoint)
        async with serving(config, runner=FakeRunner(script=saying("abc"))) as served:
            await served.complete(prompt=["a", "b"], request_id="two")
            await served.complete(stop="b")
            await served.post("/v1/completions", {"prompt": ""})  # refused: nothing was generated
            await served.client.get("/v1/models")
            await end(served)
        spans = [attributes(span) for span in collector.spans]
        assert [span["gen_ai.request.id"] for span in spans[:2]] == ["two", "two"]
        assert [span["gen_ai.usage.completion_tokens"] for span in spans] == [4, 4, 2]
        assert all("gen_ai.latency.time_in_queue" in span for span in spans)
        assert not any(span.parent_span_id for span in collector.spans)
    with collecting() as collector:
        config = ServerConfig(otlp_traces_endpoint=collector.endpoint)
        async with serving(config, runner=FakeRunner(seconds=0.01)) as served:
            request = RawRequest(served.app, "/v1/completions", {"prompt": "hi", "max_tokens": 200, "stream": True})
            await request.until(lambda: "data:" in request.text)
            request.gone.set()
            await request.task
            served.runner.failure = RuntimeError("the device is on fire")
            assert (await served.post("/v1/completions", {"prompt": "hi"})).status_code == 500
            assert served.state.tracing is not None
            await asyncio.to_thread(served.state.tracing.close)
        aborted, failed = collector.spans
    assert attributes(aborted)["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes(aborted)["gen_ai.usage.completion_tokens"] > 0
    assert aborted.status.code == 0
    assert attributes(failed)["gen_ai.response.finish_reasons"] == ["error"]
    assert failed.status.code == 2  # error


@asynchronous
async def test_the_caller_decides_whether_a_request_is_traced():
    with collecting() as collector:
        async with serving(ServerConfig(otlp_traces_endpoint=collector.endpoint)) as served:
            for parent in (f"00-{TRACE_ID}-{PARENT_ID}-00", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01"):
                response = await served.post("/v1/completions", {"prompt": "hi"}, traceparent=parent)
                assert response.status_code == 200
            await end(served)
        assert [span.parent_span_id for span in collector.spans] == [b"", b""]


@asynchronous
async def test_requests_do_not_wait_for_a_collector_that_is_gone(caplog: pytest.LogCaptureFixture):
    caplog.set_level("CRITICAL")  # the exporter complains, as it should
    with collecting() as collector:
        endpoint = collector.endpoint
    async with serving(ServerConfig(otlp_traces_endpoint=endpoint)) as served:
        for _ in range(3):
            assert (await served.complete())["usage"]["completion_tokens"] == 16
        loop = asyncio.get_running_loop()
        started = loop.time()
        await end(served)
        assert loop.time() - started < 3


def test_without_the_packages_the_option_names_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as error:
        Tracing("http://localhost:4318/v1/traces", "tiny")
    assert "tpu-serve[otel]" in str(error.value)
    monkeypatch.setattr("tpu_serve.server.run.configure_logging", lambda config: None)
    config = ServerConfig(port=0, otlp_traces_endpoint="http://localhost:4318/v1/traces")
    assert serve(config, EngineConfig(), lambda config, on_phase: pytest.fail("it loads")) == 2
    assert "tpu-serve[otel]" in caplog.text
