"""Metrics: present from the start, exact afterwards."""

import asyncio
from typing import Any

import pytest
from fakes import FakeRunner, RawRequest, Served, asynchronous, saying, serving
from prometheus_client.parser import text_string_to_metric_families

from tpu_serve.config import ServerConfig

ENGINE = {"model_name": "tiny", "engine": "0"}
PREFIXES = ("tpu_serve", "vllm")
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "request_num_preemptions",
    "iteration_tokens_total",
)
PLAIN = (
    ("num_requests_running",),
    ("num_requests_waiting",),
    ("num_requests_waiting_by_reason", "capacity"),
    ("num_requests_waiting_by_reason", "deferred"),
    ("kv_cache_usage_perc",),
    ("prefix_cache_queries_total",),
    ("prefix_cache_hits_total",),
    ("num_preemptions_total",),
    ("prompt_tokens_total",),
    ("prompt_tokens_by_source_total", "local_compute"),
    ("prompt_tokens_by_source_total", "local_cache_hit"),
    ("prompt_tokens_by_source_total", "external_kv_transfer"),
    ("prompt_tokens_cached_total",),
    ("prompt_tokens_cached_by_source_total", "device"),
    ("generation_tokens_total",),
    *(("request_success_total", reason) for reason in ("stop", "length", "abort", "error")),
    ("admission_rejections_total", "max_num_queued_reqs"),
    ("admission_rejections_total", "max_num_queued_tokens"),
    ("corrupted_requests_total",),
)
OWN = (
    ("steps_total",),
    ("compile_total", "serving"),
    ("compile_seconds_total",),
    ("compile_cache_hits_total",),
    ("padded_tokens_ratio",),
    ("step_time_seconds_count", "prefill"),
    ("step_time_seconds_count", "decode"),
    ("step_time_seconds_count", "mixed"),
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
            for prefix in PREFIXES:
                for name, *labels in PLAIN:
                    assert values[f"{prefix}:{name}", *labels] == 0, name
                for name in HISTOGRAMS:
                    assert [values[f"{prefix}:{name}_{part}",] for part in ("count", "sum")] == [0, 0]
                    assert values[f"{prefix}:{name}_bucket", "+Inf"] == 0
                assert values[f"{prefix}:engine_sleep_state", "awake"] == 1
            for name, *labels in OWN:
                assert values[f"tpu_serve:{name}", *labels] == 0, name
                assert (f"vllm:{name}", *labels) not in values
            assert values["tpu_serve:compile_total", "start"] == (0 if loading else 3)
            # Token buckets by how their experts run; there are none before the model is known.
            plans = {key[1:]: value for key, value in values.items() if key[0] == "tpu_serve:moe_plans"}
            assert plans == ({} if loading else {("none", "ragged"): 3})
            assert values["process_open_fds",] > 0
            assert any(key[0] == "python_info" for key in values)


def expected_values(num_requests: int, num_prompt: int, num_cached: int, max_tokens: int) -> dict[Any, float]:
    """What equal requests that run to their limits, one after another, must have added; lengths are in tokens."""
    each = (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_num_preemptions",
    )
    sums = {
        "request_prompt_tokens": num_requests * num_prompt,
        "request_generation_tokens": num_requests * max_tokens,
        "request_max_num_generation_tokens": num_requests * max_tokens,
        "request_params_max_tokens": num_requests * max_tokens,
        "request_params_n": num_requests,
        "request_prefill_kv_computed_tokens": num_requests * num_prompt - num_cached,
    }
    return {
        **{(f"{name}_count",): num_requests for name in (*each, *sums)},
        **{(f"{name}_sum",): total for name, total in sums.items()},
        ("inter_token_latency_seconds_count",): num_requests * (max_tokens - 1),
        # A step for every token, and the prompt comes with the first one.
        ("iteration_tokens_total_count",): num_requests * max_tokens,
        ("iteration_tokens_total_sum",): num_requests * (num_prompt + max_tokens),
        ("prompt_tokens_total",): num_requests * num_prompt,
        ("prompt_tokens_cached_total",): num_cached,
        ("prompt_tokens_cached_by_source_total", "device"): num_cached,
        ("prompt_tokens_by_source_total", "local_cache_hit"): num_cached,
        ("prompt_tokens_by_source_total", "local_compute"): num_requests * num_prompt - num_cached,
        ("prompt_tokens_by_source_total", "external_kv_transfer"): 0,
        ("prefix_cache_queries_total",): num_requests * num_prompt,
        ("prefix_cache_hits_total",): num_cached,
        ("generation_tokens_total",): num_requests * max_tokens,
        ("request_success_total", "length"): num_requests,
        ("request_success_total", "stop"): 0,
        ("request_num_preemptions_sum",): 0,
        ("num_preemptions_total",): 0,
        ("num_requests_running",): 0,
        ("num_requests_waiting",): 0,
        ("kv_cache_usage_perc",): 0,
    }


@pytest.mark.parametrize("num_decode_steps", [1, 4])
@asynchronous
async def test_ten_requests_of_ten_tokens(num_decode_steps: int):
    """Steps of one launch count like any others."""
    async with serving(num_decode_steps=num_decode_steps) as served:
        usages = [(await served.complete(prompt="x" * 20, max_tokens=10, ignore_eos=True))["usage"] for _ in range(10)]
        await served.idle()
        values = await scrape(served)
    num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert num_cached == 9 * 16  # two pages of eight tokens; the first request finds none
    for prefix in PREFIXES:
        for (name, *labels), value in expected_values(10, 20, num_cached, 10).items():
            assert values[f"{prefix}:{name}", *labels] == value, name
        for name in ("request_prompt_tokens", "request_generation_tokens"):
            assert values[f"{prefix}:{name}_bucket", "20.0"] == 10
            assert values[f"{prefix}:{name}_bucket", "5.0"] == 0
    assert values["tpu_serve:compile_total", "start"] == 3
    assert values["tpu_serve:compile_total", "serving"] == 0
    assert values["tpu_serve:steps_total",] == served.runner.num_steps
    # Four tokens behind the cached ones are a chunk too.
    assert values["tpu_serve:step_time_seconds_count", "prefill"] == 10
    assert values["tpu_serve:step_time_seconds_count", "decode"] == 90
    assert values["http_requests_total", "/v1/completions", "2xx", "POST"] == 10
    assert values["http_request_duration_seconds_count", "/v1/completions", "POST"] == 10
    assert values["http_request_duration_highr_seconds_count",] == 10


@asynchronous
async def test_phases_of_a_request_add_up():
    async with serving(runner=FakeRunner(seconds=0.02)) as served:
        await served.complete(max_tokens=6, ignore_eos=True)
        values = await scrape(served)
    queue, prefill, decode, inference, latency = (
        values[f"vllm:{name}_seconds_sum",]
        for name in (
            "request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time",
            "e2e_request_latency",
        )
    )  # fmt: skip
    assert prefill >= 0.02
    assert decode >= 0.1
    assert abs(prefill + decode - inference) < 1e-6
    assert queue + inference <= latency < queue + inference + 0.5
    assert abs(values["vllm:request_time_per_output_token_seconds_sum",] - decode / 5) < 1e-6
    assert values["vllm:time_to_first_token_seconds_sum",] >= 0.02
    assert values["tpu_serve:step_time_seconds_sum", "decode"] >= 0.1


@pytest.mark.parametrize("num_decode_steps", [1, 5])
@asynchronous
async def test_counts_agree_with_usage_whatever_ends_an_answer(num_decode_steps: int):
    runner = FakeRunner(script=saying("one two three"))
    async with serving(runner=runner, num_decode_steps=num_decode_steps) as served:
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
        # A stop string is found by the frontend alone; the phases of such a request are known all the same.
        for name in ("e2e_request_latency_seconds", "request_decode_time_seconds", "request_queue_time_seconds"):
            assert values[f"vllm:{name}_count",] == 8, name
        assert values["vllm:request_params_n_count",] == 6
        assert values["vllm:request_params_n_sum",] == 8
        assert values["vllm:request_max_num_generation_tokens_count",] == 6
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
        await asyncio.sleep(0.5)
        values = await scrape(served)
        assert values["vllm:num_requests_running",] == values["vllm:num_requests_waiting",] == 0
        assert values["vllm:kv_cache_usage_perc",] == 0
        assert values["vllm:request_success_total", "abort"] == 20
        # What was counted of them in passing and at their end agrees; twelve never got a token.
        for name in ("prompt_tokens", "generation_tokens"):
            assert values[f"vllm:{name}_total",] == values[f"vllm:request_{name}_sum",] > 0
        assert values["vllm:prompt_tokens_total",] == 8 * 2
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_params_n"):
            assert values[f"vllm:{name}_count",] == 20
        for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_decode_time_seconds"):
            assert values[f"vllm:{name}_count",] == 8
        assert values["http_requests_total", "/v1/completions", "2xx", "POST"] == 20


@asynchronous
async def test_what_the_queue_refuses_is_counted_by_its_limit():
    async with serving(runner=FakeRunner(seconds=0.05), max_num_queued=8) as served:
        running = [
            RawRequest(served.app, "/v1/completions", {"prompt": "hi", "max_tokens": 200, "stream": True})
            for _ in range(8)
        ]
        await running[0].until(lambda: len(served.engine.core.scheduler.running) == 8)
        answers = await asyncio.gather(
            *(served.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, "n": 8}) for _ in range(2)),
            _all_gone_later(running),
        )
        statuses = [answer.status_code for answer in answers[:2]]
        values = await scrape(served)
    assert sorted(statuses) == [200, 503]
    for prefix in PREFIXES:
        assert values[f"{prefix}:admission_rejections_total", "max_num_queued_reqs"] == 8
        assert values[f"{prefix}:admission_rejections_total", "max_num_queued_tokens"] == 0
        assert values[f"{prefix}:request_success_total", "length"] == 8
    assert values["http_requests_total", "/v1/completions", "5xx", "POST"] == 1


async def _all_gone_later(requests: list[RawRequest]) -> None:
    await asyncio.sleep(0.2)
    for request in requests:
        request.gone.set()
    await asyncio.gather(*(request.task for request in requests))


@asynchronous
async def test_a_request_whose_logits_are_no_numbers_is_counted():
    async with serving(runner=FakeRunner(script=saying("ab", -1))) as served:
        assert (await served.post("/v1/completions", {"prompt": "hi"})).status_code == 500
        values = await scrape(served)
    for prefix in PREFIXES:
        assert values[f"{prefix}:corrupted_requests_total",] == 1
        assert values[f"{prefix}:request_success_total", "error"] == 1
        assert values[f"{prefix}:request_generation_tokens_sum",] == values[f"{prefix}:generation_tokens_total",] == 2


@asynchronous
async def test_other_names_are_a_repetition_under_another_prefix_or_none():
    for prefix, seen in (("tpu_serve", {"tpu_serve"}), ("sglang", {"tpu_serve", "sglang"})):
        async with serving(ServerConfig(metrics_prefix=prefix)) as served:
            await served.complete()
            text = (await served.client.get("/metrics")).text
        families = [family.name for family in text_string_to_metric_families(text)]
        assert len(families) == len(set(families)), "a family is told twice"
        assert {name.split(":")[0] for name in families if ":" in name} == seen


@asynchronous
async def test_buckets_of_token_counts_end_at_the_context_and_sizes_of_the_cache_are_labels():
    async with serving() as served:
        text = (await served.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("request_prompt_tokens", "request_params_max_tokens", "request_prefill_kv_computed_tokens"):
        bounds = [sample.labels["le"] for sample in families[f"vllm:{name}"].samples if "le" in sample.labels]
        assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf"]
    (sizes,) = families["vllm:cache_config_info"].samples
    assert sizes.value == 1
    shown = {name: sizes.labels[name] for name in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens")}
    assert shown == {"block_size": "8", "num_gpu_blocks": "128", "kv_cache_size_tokens": "1024"}
    assert sizes.labels["kv_cache_max_concurrency"] == "4.00"


@asynchronous
async def test_sizes_of_bodies_are_added_up():
    async with serving() as served:
        sent = b'{"prompt": "hi", "max_tokens": 3}'
        response = await served.client.post(
            "/v1/completions", content=sent, headers={"content-type": "application/json"}
        )
        values = await scrape(served)
    assert values["http_request_size_bytes_count", "/v1/completions"] == 1
    assert values["http_request_size_bytes_sum", "/v1/completions"] == len(sent)
    assert values["http_response_size_bytes_sum", "/v1/completions"] == len(response.content)


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
    async with serving(ServerConfig(enable_log_requests=True, max_log_len=4)) as served:
        caplog.clear()
        await served.post("/v1/completions", {"prompt": "secret", "request_id": "me"})
        assert [record.getMessage().split(":")[0] for record in caplog.records] == [
            "Request me asks",
            "Request me done",
        ]
        assert caplog.records[0].getMessage().endswith(": 'secr…'")
    async with serving() as served:
        caplog.clear()
        await served.complete()
        assert caplog.records == []
