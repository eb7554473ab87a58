"""Traces of requests, sent to a collector by OpenTelemetry."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from tpu_serve.config import ConfigError
from tpu_serve.engine.choice import Choice
from tpu_serve.engine.frontend import Generation, Observer
from tpu_serve.request import FinishReason, Timing
from tpu_serve.server.context import current_scope

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN = "llm_request"
CLOSING = 2.0
"""Seconds that spans still here get to reach the collector at the end."""
CONTEXT_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """One span for the answer to each prompt, from its arrival to its end; an `Observer` of the frontend.

    Spans leave in a thread of their own, and are dropped where the collector cannot take them: requests never wait for it.

    Args:
      endpoint: address of the collector.
      model_name: as answers say it.
      exporter: what sends the spans; over HTTP to the endpoint when left out.

    Raises:
      ConfigError: the packages for it are not installed.
    """

    def __init__(self, endpoint: str, model_name: str, exporter: SpanExporter | None = None):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs packages that are not installed ({error.name}): install tpu-serve[otel]."
            ) from None
        self._model_name = model_name
        # Every attempt of the exporter is not worth a line; that it gave up is.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.ERROR)
        # Both read the environment, OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS among others.
        resource = Resource.create({"service.name": "tpu-serve"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tpu_serve")
        self._kind, self._failed = SpanKind.SERVER, StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()
        self._open: dict[Generation, tuple[Any, Scope | None]] = {}

    def close(self) -> None:
        """Sends what is left, for a limited time."""

        def work() -> None:
            self._provider.force_flush()
            self._provider.shutdown()

        closer = threading.Thread(target=work, name="tracing", daemon=True)  # a collector may be slow, or gone
        closer.start()
        closer.join(CLOSING)

    def started(self, generation: Generation) -> None:
        scope, carrier = current_scope.get(), {}
        if scope is not None:
            given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            carrier = {name: given[name] for name in CONTEXT_HEADERS if name in given}
        arrival = generation.choices[0].request.arrival
        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(carrier),
            kind=self._kind,
            start_time=time.time_ns() - round((time.monotonic() - arrival) * 1e9),
            attributes=self._asked(generation),
        )
        self._open[generation] = span, scope

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None: ...

    def next_tokens(self, num_tokens: int, since_previous: float) -> None: ...

    def step(self, num_tokens: int) -> None: ...

    def finished(self, choice: Choice, reason: FinishReason, since_arrival: float) -> None: ...

    def answered(self, generation: Generation) -> None:
        span, scope = self._open.pop(generation)
        # The body may have replaced the id meanwhile.
        request_id = generation.id if scope is None else scope["state"]["request_id"]
        span.set_attributes({"gen_ai.request.id": request_id, **_told(generation)})
        if any(choice.finish_reason is FinishReason.ERROR for choice in generation.choices):
            span.set_status(self._failed)
        span.end()

    def rejected(self, limit: str, num_choices: int) -> None: ...

    def _asked(self, generation: Generation) -> dict[str, Any]:
        params = generation.choices[0].request.params
        return {
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self._model_name,
            "gen_ai.usage.prompt_tokens": generation.num_prompt_tokens,
            "gen_ai.usage.num_sequences": len(generation.choices),
        }


def _told(generation: Generation) -> dict[str, Any]:
    """How it went. Times are seconds: until the first token of any choice, and of the choice that took longest otherwise."""
    choices = generation.choices
    attributes: dict[str, Any] = {
        "gen_ai.usage.completion_tokens": generation.num_completion_tokens,
        "gen_ai.usage.cached_tokens": generation.num_cached_tokens,
        "gen_ai.response.finish_reasons": [str(choice.finish_reason) for choice in choices],
        "gen_ai.latency.e2e": time.monotonic() - choices[0].request.arrival,
    }
    timings = [choice.timing for choice in choices if choice.timing is not None]
    return attributes | _phases(timings)


def _phases(timings: Sequence[Timing]) -> dict[str, float]:
    known = [
        (timing.arrival, timing.admitted, timing.first_token, timing.last_token)
        for timing in timings
        if timing.admitted is not None and timing.first_token is not None and timing.last_token is not None
    ]
    if not known:
        return {}
    inference = max(last - admitted for _, admitted, _, last in known)
    return {
        "gen_ai.latency.time_in_queue": max(admitted - arrival for arrival, admitted, _, _ in known),
        "gen_ai.latency.time_to_first_token": min(first - arrival for arrival, _, first, _ in known),
        "gen_ai.latency.time_in_model_prefill": max(first - admitted for _, admitted, first, _ in known),
        "gen_ai.latency.time_in_model_decode": max(last - first for _, _, first, last in known),
        "gen_ai.latency.time_in_model_inference": inference,
    }


class Observers:
    """Several as one."""

    def __init__(self, *observers: Observer):
        self._observers = observers

    def started(self, generation: Generation) -> None:
        for observer in self._observers:
            observer.started(generation)

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None:
        for observer in self._observers:
            observer.first_token(choice, num_tokens, since_arrival)

    def next_tokens(self, num_tokens: int, since_previous: float) -> None:
        for observer in self._observers:
            observer.next_tokens(num_tokens, since_previous)

    def step(self, num_tokens: int) -> None:
        for observer in self._observers:
            observer.step(num_tokens)

    def finished(self, choice: Choice, reason: FinishReason, since_arrival: float) -> None:
        for observer in self._observers:
            observer.finished(choice, reason, since_arrival)

    def answered(self, generation: Generation) -> None:
        for observer in self._observers:
            observer.answered(generation)

    def rejected(self, limit: str, num_choices: int) -> None:
        for observer in self._observers:
            observer.rejected(limit, num_choices)
