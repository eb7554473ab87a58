"""Prometheus metrics under the names that dashboards for vLLM know, and some of our own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from tpu_serve.engine.choice import Choice
from tpu_serve.engine.frontend import Generation
from tpu_serve.engine.served import ServedEngine
from tpu_serve.request import FinishReason
from tpu_serve.server import metric_families as families
from tpu_serve.server.engine_metrics import EngineMetrics, OwnMetrics
from tpu_serve.server.metric_families import OWN_PREFIX, Families
from tpu_serve.server.step_metrics import StepMetrics

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Of the queue, as `Observer.rejected` names them."""
UNKNOWN_MAX_MODEL_LEN = 500_000
"""How far histograms of tokens reach before the model is known; no request is counted before."""


class Metrics:
    """Every metric of one server, in a registry of its own; zeros before the first request. An `Observer` of the frontend.

    Every choice is an engine's request. The sums of per-request histograms agree with the totals whatever ends requests: one that ended
    before its first token counts with no prompt tokens, as in the totals. Phases are told of requests that got a first token.

    Args:
      model_name: value of the label.
      prefix: under which everything that other servers of this kind tell is repeated.
    """

    def __init__(self, model_name: str, prefix: str = "vllm"):
        self.registry = CollectorRegistry()
        self._labels, self._prefixes = (model_name, "0"), (OWN_PREFIX, prefix)
        shared, own = Families(self._labels, self._prefixes), Families(self._labels, (OWN_PREFIX,))
        self._engine, self._own_engine = EngineMetrics(self._labels), OwnMetrics(self._labels)
        self._steps = StepMetrics(self._labels, own)
        shared.add(self._engine)
        own.add(self._own_engine)
        self._make_totals(shared)
        self._make_times(shared)
        self._make_lengths(UNKNOWN_MAX_MODEL_LEN)
        for collector in (shared, own):
            self.registry.register(collector)
        self._make_http()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _make_totals(self, shared: Families) -> None:
        self._prompt_tokens = shared.counter("prompt_tokens", "Prompt tokens of requests that got their first token")
        by_source = shared.labelled_counter(
            "prompt_tokens_by_source", "Prompt tokens by where they came from", "source"
        )
        self._computed = by_source.labels(*self._labels, "local_compute")
        self._from_cache = by_source.labels(*self._labels, "local_cache_hit")
        by_source.labels(*self._labels, "external_kv_transfer")  # always 0
        self._cached = shared.counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache")
        cached_by_source = shared.labelled_counter(
            "prompt_tokens_cached_by_source", "Prompt tokens from the cache by where they lay", "source"
        )
        self._cached_on_device = cached_by_source.labels(*self._labels, "device")
        self._generation_tokens = shared.counter("generation_tokens", "Generated tokens that belong to answers")
        success = shared.labelled_counter("request_success", "Requests that ended, by reason", "finished_reason")
        self._finished = {reason: success.labels(*self._labels, reason.value) for reason in FinishReason}
        rejections = shared.labelled_counter(
            "admission_rejections", "Requests refused because of a limit of the queue", "reason"
        )
        self._rejections = {limit: rejections.labels(*self._labels, limit) for limit in LIMITS}

    def _make_times(self, shared: Families) -> None:
        self._first_token = shared.histogram(
            "time_to_first_token_seconds", "From arrival to the first token", families.TO_FIRST_TOKEN
        )
        self._next_token = shared.bulk_histogram(
            "inter_token_latency_seconds", "From one token to the next", families.TO_NEXT_TOKEN
        )
        self._per_token = shared.histogram(
            "request_time_per_output_token_seconds",
            "Mean time from one token to the next of a request, 0 for a single token",
            families.TO_NEXT_TOKEN,
        )

        def latency(name: str, help: str) -> Histogram:
            return shared.histogram(name, help, families.LATENCY)

        self._latency = latency("e2e_request_latency_seconds", "From arrival to the end")
        self._queue = latency("request_queue_time_seconds", "From arrival to the first step")
        self._prefill = latency("request_prefill_time_seconds", "From the first step to the first token")
        self._decode = latency("request_decode_time_seconds", "From the first token to the last")
        self._inference = latency("request_inference_time_seconds", "From the first step to the last token")
        self._num_preemptions = shared.histogram(
            "request_num_preemptions", "How often a request lost its pages", families.PREEMPTIONS
        )
        self._num_choices = shared.histogram("request_params_n", "Choices asked for of a prompt", families.CHOICES)
        self._step_tokens = shared.histogram(
            "iteration_tokens_total",
            "Tokens that a step brought: generated ones, and prompts with their first token",
            families.STEP_TOKENS,
        )

    def _make_lengths(self, max_model_len: int) -> None:
        """Their bounds follow the model's context."""
        lengths, buckets = Families(self._labels, self._prefixes), families.token_buckets(max_model_len)
        self._request_prompt = lengths.histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended, 0 without a first token", buckets
        )
        self._request_generation = lengths.histogram(
            "request_generation_tokens", "Generated tokens of a request that ended", buckets
        )
        self._longest_choice = lengths.histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest choice of a prompt", buckets
        )
        self._max_tokens = lengths.histogram("request_params_max_tokens", "Tokens that a request may generate", buckets)
        self._prefill_computed = lengths.histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were computed, not cached", buckets
        )
        self.registry.register(lengths)
        self._lengths = lengths

    def _make_http(self) -> None:
        self._http_requests = Counter(
            "http_requests", "HTTP requests", ("method", "status", "handler"), registry=self.registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Whole HTTP exchanges",
            ("method", "handler"),
            buckets=families.HTTP_DURATION,
            registry=self.registry,
        )
        self._http_duration_fine = Histogram(
            "http_request_duration_highr_seconds",
            "Whole HTTP exchanges of all paths",
            buckets=families.HTTP_DURATION_FINE,
            registry=self.registry,
        )
        self._http_request_size = Summary(
            "http_request_size_bytes", "Bodies of requests", ("handler",), registry=self.registry
        )
        self._http_response_size = Summary(
            "http_response_size_bytes", "Bodies of responses", ("handler",), registry=self.registry
        )

    def watch(self, engine: ServedEngine) -> None:
        """From now on gauges and the scheduler's counters are this engine's, read when they are asked for."""
        self.registry.unregister(self._lengths)
        self._make_lengths(engine.info.max_model_len)
        self._engine.engine = engine
        self._own_engine.watch(engine)
        self._steps.watch(engine)

    def text(self) -> bytes:
        """Everything in the text format."""
        return generate_latest(self.registry)

    # ---- what the frontend tells ------------------------------------------------------------------------------------

    def started(self, generation: Generation) -> None: ...

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None:
        num_prompt, num_cached = len(choice.request.prompt_token_ids), choice.num_cached_tokens
        self._prompt_tokens.inc(num_prompt)
        self._computed.inc(num_prompt - num_cached)
        for counter in (self._from_cache, self._cached, self._cached_on_device):
            counter.inc(num_cached)
        self._generation_tokens.inc(num_tokens)
        self._first_token.observe(since_arrival)

    def next_tokens(self, num_tokens: int, since_previous: float) -> None:
        self._generation_tokens.inc(num_tokens)
        self._next_token.observe(since_previous, num_tokens)

    def step(self, num_tokens: int) -> None:
        self._step_tokens.observe(num_tokens)

    def finished(self, choice: Choice, reason: FinishReason, since_arrival: float) -> None:
        request, timing, num_tokens = choice.request, choice.timing, choice.num_tokens
        self._finished[reason].inc()
        self._latency.observe(since_arrival)
        self._request_prompt.observe(len(request.prompt_token_ids) if num_tokens else 0)
        self._request_generation.observe(num_tokens)
        self._max_tokens.observe(request.params.max_tokens or 0)
        if timing is None or timing.admitted is None or timing.first_token is None or timing.last_token is None:
            return
        decode = timing.last_token - timing.first_token
        self._queue.observe(timing.admitted - timing.arrival)
        self._prefill.observe(timing.first_token - timing.admitted)
        self._decode.observe(decode)
        self._inference.observe(timing.last_token - timing.admitted)
        self._per_token.observe(decode / (num_tokens - 1) if num_tokens > 1 else 0.0)
        self._num_preemptions.observe(timing.num_preemptions)
        self._prefill_computed.observe(timing.num_prompt_computed)

    def answered(self, generation: Generation) -> None:
        self._num_choices.observe(len(generation.choices))
        self._longest_choice.observe(max(choice.num_tokens for choice in generation.choices))

    def rejected(self, limit: str, num_choices: int) -> None:
        self._rejections[limit].inc(num_choices)

    # ---- what the edge tells ----------------------------------------------------------------------------------------

    def http_request(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Counts one exchange.

        Args:
          handler: the path as declared, so that ids in paths make no labels.
          request_bytes, response_bytes: of the bodies.
        """
        self._http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._http_duration.labels(method, handler).observe(seconds)
        self._http_duration_fine.observe(seconds)
        self._http_request_size.labels(handler).observe(request_bytes)
        self._http_response_size.labels(handler).observe(response_bytes)
