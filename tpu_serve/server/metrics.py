"""Prometheus metrics under the names that dashboards for vLLM know, and some of our own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from tpu_serve.engine.choice import Choice
from tpu_serve.engine.engine import Engine
from tpu_serve.request import FinishReason

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
LABELS = ("model_name", "engine")

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_NEXT_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_NUM_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Every metric of one server, in a registry of its own; zeros before the first request. An `Observer` of the frontend."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        labels = (model_name, "0")
        self._engine = _EngineCollector(labels)
        self.registry.register(self._engine)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, LABELS, buckets=buckets, registry=self.registry).labels(*labels)

        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, LABELS, registry=self.registry).labels(*labels)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got their first token")
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens that belong to answers")
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN
        )
        self._next_token = histogram("vllm:inter_token_latency_seconds", "From one token to the next", _NEXT_TOKEN)
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end", _LATENCY)
        self._request_prompt = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request", _NUM_TOKENS
        )
        self._request_generation = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a finished request", _NUM_TOKENS
        )
        success = Counter(
            "vllm:request_success", "Finished requests by reason", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._finished = {reason: success.labels(*labels, reason.value) for reason in FinishReason}
        self._http_requests = Counter(
            "http_requests", "HTTP requests", ("handler", "method", "status"), registry=self.registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds", "Whole HTTP exchanges", ("handler", "method"), registry=self.registry
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def watch(self, engine: Engine) -> None:
        """From now on gauges and the scheduler's counters are this engine's, read when they are asked for."""
        self._engine.engine = engine

    def text(self) -> bytes:
        """Everything in the text format."""
        return generate_latest(self.registry)

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None:
        self._prompt_tokens.inc(len(choice.request.prompt_token_ids))
        self._generation_tokens.inc(num_tokens)
        self._first_token.observe(since_arrival)

    def next_token(self, choice: Choice, num_tokens: int, since_previous: float) -> None:
        self._generation_tokens.inc(num_tokens)
        self._next_token.observe(since_previous)

    def finished(self, choice: Choice, reason: FinishReason, since_arrival: float) -> None:
        self._finished[reason].inc()
        self._latency.observe(since_arrival)
        self._request_prompt.observe(len(choice.request.prompt_token_ids))
        self._request_generation.observe(choice.num_tokens)

    def http_request(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts one exchange.

        Args:
          handler: the path as declared, so that ids in paths make no labels.
        """
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_duration.labels(handler, method).observe(seconds)


class _EngineCollector(Collector):
    """What the engine itself knows, read at the time of a scrape, so that it can never lag behind."""

    def __init__(self, labels: tuple[str, str]):
        self._labels = labels
        self.engine: Engine | None = None

    def collect(self) -> Iterator[Metric]:
        core = None if self.engine is None else self.engine.core
        scheduler = None if core is None else core.scheduler
        stats = None if scheduler is None else scheduler.stats
        has_cache = scheduler is not None and scheduler.enable_prefix_caching
        yield self._gauge(
            "vllm:num_requests_running", "Requests in the batch", len(scheduler.running) if scheduler else 0
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests in the queue", len(scheduler.waiting) if scheduler else 0
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache in use, 0 to 1",
            scheduler.cache.usage if scheduler else 0,
        )
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            stats.prefix_queries if stats and has_cache else 0,
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits if stats else 0
        )
        yield self._counter(
            "vllm:num_preemptions", "Requests that lost their pages", stats.num_preemptions if stats else 0
        )
        yield self._counter("tpu_serve:steps", "Steps of the engine", core.num_steps if core else 0)
        yield self._counter(
            "tpu_serve:compile", "Programs compiled; constant once ready", core.runner.compile_count if core else 0
        )
        yield self._moe_plans()

    def _moe_plans(self) -> Metric:
        family = GaugeMetricFamily(
            "tpu_serve:moe_plans",
            "Token buckets by how their experts run and where the tiles come from",
            labels=(*LABELS, "path", "source"),
        )
        for (path, source), count in sorted(self.engine.moe_plans.items() if self.engine else ()):
            family.add_metric((*self._labels, path, source), count)
        return family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
