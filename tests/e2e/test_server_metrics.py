"""Metrics: present from the start, exact afterwards."""

import asyncio
from typing import Any

from fakes import FakeRunner, RawRequest, Served, asynchronous, saying, serving
from prometheus_client.parser import text_string_to_metric_families

from tpu_serve.config import ServerConfig

ENGINE = {"model_name": "tiny", "engine": "0"}
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
)
PLAIN = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "tpu_serve:steps_total",
    "tpu_serve:compile_total",
)


async def scrape(served: Served) -> dict[Any, float]:
    """Value by (name, labels without model and engine)."""
    response = await served.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "tpu_serve:")):
                assert {name: labels.pop(name) for name in ENGINE} == ENGINE, sample
            values[sample.name, *sorted(labels.values())] = sample.value
    return values


@asynchronous
async def test_everything_is_there_before_the_first_request():
    for loading in (True, False):
        async with serving(loading=loading) as served:
            values = await scrape(served)
            for name in PLAIN:
                assert values[name,] == (3 if name == "tpu_serve:compile_total" and not loading else 0), name
            for name in HISTOGRAMS:
                assert values[f"{name}_count",] == values[f"{name}_sum",] == values[f"{name}_bucket", "+Inf"] == 0
            for reason in ("stop", "length", "abort", "error"):
                assert values["vllm:request_success_total", reason] == 0
            # Token buckets by how their experts run; there are none before the model is known.
            plans = {key[1:]: value for key, value in values.items() if key[0] == "tpu_serve:moe_plans"}
            assert plans == ({} if loading else {("none", "ragged"): 3})
            assert values["process_open_fds",] > 0
            assert any(key[0] == "python_info" for key in values)


@asynchronous
async def test_ten_requests_of_ten_tokens():
    async with serving() as served:
        usages = [(await served.complete(prompt="x" * 20, max_tokens=10, ignore_eos=True))["usage"] for _ in range(10)]
        values = await scrape(served)
    assert values["vllm:prompt_tokens_total",] == 200
    assert values["vllm:generation_tokens_total",] == 100
    assert values["vllm:request_success_total", "length"] == 10
    assert values["vllm:request_success_total", "stop"] == 0
    for name, total in (("vllm:request_prompt_tokens", 200), ("vllm:request_generation_tokens", 100)):
        assert values[f"{name}_count",] == 10
        assert values[f"{name}_sum",] == total
        assert values[f"{name}_bucket", "20.0"] == 10
        assert values[f"{name}_bucket", "5.0"] == 0
    assert values["vllm:time_to_first_token_seconds_count",] == 10
    assert values["vllm:inter_token_latency_seconds_count",] == 90
    assert values["vllm:e2e_request_latency_seconds_count",] == 10
    assert values["vllm:prefix_cache_queries_total",] == 200
    assert values["vllm:prefix_cache_hits_total",] == 9 * 16
    assert sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) == 9 * 16
    assert values["vllm:num_requests_running",] == values["vllm:num_requests_waiting",] == 0
    assert values["vllm:kv_cache_usage_perc",] == 0
    assert values["tpu_serve:compile_total",] == 3
    assert values["tpu_serve:steps_total",] == served.runner.num_steps
    assert values["http_requests_total", "/v1/completions", "2xx", "POST"] == 10
    assert values["http_request_duration_seconds_count", "/v1/completions", "POST"] == 10


@asynchronous
async def test_counts_agree_with_usage_whatever_ends_an_answer():
    async with serving(runner=FakeRunner(script=saying("one two three"))) as served:
        total = 0
        for fields in (
            {"stop": "two"},
            {"max_tokens": 3},
            {"n": 3},
            {"prompt": ["a", "b"]},
            {"stop_token_ids": [ord("w")]},
        ):
            total += (await served.complete(**fields))["usage"]["completion_tokens"]
        values = await scrape(served)
        assert values["vllm:generation_tokens_total",] == values["vllm:request_generation_tokens_sum",] == total
        assert values["vllm:prompt_tokens_total",] == 2 + 2 + 3 * 2 + 2 + 2
        assert values["vllm:request_success_total", "length"] == 1
        assert values["vllm:request_success_total", "stop"] == 7
        await served.post("/v1/completions", {"prompt": ""})
        await served.complete(echo=True, max_tokens=0)
        assert (await scrape(served))["vllm:request_success_total", "stop"] == 7


@asynchronous
async def test_gauges_follow_the_scheduler_without_traffic():
    async with serving(runner=FakeRunner(seconds=0.01)) as served:
        requests = [
            RawRequest(served.app, "/v1/completions", {"prompt": "hi", "max_tokens": 250, "stream": True})
            for _ in range(20)
        ]
        await requests[0].until(lambda: len(served.engine.core.scheduler.waiting) == 12)
        values = await scrape(served)
        assert values["vllm:num_requests_running",] == 8
        assert values["vllm:num_requests_waiting",] == 12
        assert values["vllm:kv_cache_usage_perc",] > 0
        for request in requests:
            request.gone.set()
        await asyncio.gather(*(request.task for request in requests))
        await asyncio.sleep(0.2)
        values = await scrape(served)
        assert values["vllm:num_requests_running",] == values["vllm:num_requests_waiting",] == 0
        assert values["vllm:kv_cache_usage_perc",] == 0
        assert values["vllm:request_success_total", "abort"] == 20
        assert values["http_requests_total", "/v1/completions", "2xx", "POST"] == 20


@asynchronous
async def test_http_counts_have_bounded_labels():
    async with serving(ServerConfig(api_key=("key",)), loading=True) as served:
        served.client.headers["authorization"] = "Bearer key"
        for path in ("/nope/1", "/nope/2", "/v1/models/a", "/v1/models/b/c", "/health", "/metrics/"):
            await served.client.get(path)
        await served.client.request("BREW", "/v1/completions")
        await served.client.get("/v1/models", headers={"authorization": "Bearer other"})
        values = await scrape(served)
    counts = {key[1:]: value for key, value in values.items() if key[0] == "http_requests_total"}
    assert counts == {
        ("4xx", "GET", "none"): 3,
        ("/v1/models/{id:path}", "4xx", "GET"): 2,
        ("/health", "5xx", "GET"): 1,
        ("/metrics/", "2xx", "GET"): 1,
        ("/v1/completions", "4xx", "OTHER"): 1,
    }


@asynchronous
async def test_one_log_line_per_request_without_its_text(caplog: Any):
    async with serving(ServerConfig(enable_log_requests=True)) as served:
        caplog.set_level("INFO", logger="tpu_serve")
        await served.post("/v1/completions", {"prompt": "secret", "max_tokens": 3, "request_id": "me"})
        (record,) = caplog.records
        message = record.getMessage()
        assert message.startswith("Request me done: 6 prompt tokens (0 cached), 3 completion tokens, ")
    async with serving() as served:
        caplog.clear()
        await served.complete()
        assert caplog.records == []
