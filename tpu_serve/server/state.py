"""What the server can do at the moment: loading, ready, draining or dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from tpu_serve.config import ServerConfig
from tpu_serve.engine.served import ServedEngine
from tpu_serve.request import InvalidRequest
from tpu_serve.server.body import BodyReader
from tpu_serve.server.deep_health import DeepHealth
from tpu_serve.server.errors import HttpError, queue_full, shutting_down, unavailable
from tpu_serve.server.metrics import Metrics
from tpu_serve.server.replies import HealthReply
from tpu_serve.server.service import Service
from tpu_serve.server.tracing import Observers, Tracing

Status = Literal["loading", "ready", "draining", "dead"]
RETRY_AFTER_LOADING = 5
RETRY_AFTER_DEATH = 30
LAST_BODY = 2.0
"""Seconds that a body still on its way gets when the server starts to end."""


class ServerState:
    """The one mutable object of the server; lives in the event loop's thread.

    Args:
      config: of the endpoint.
      names: names of the model that requests may use.
      root: where the model comes from.
      on_failure: called once with a sentence when the engine fails while it runs.

    Raises:
      ConfigError: traces are asked for and cannot be made.

    Attributes:
      service: None until the engine is ready.
      tracing: None when nobody asked for traces; whoever ends the server closes it.
      bodies: reads request bodies.
      started: on the monotonic clock, in seconds.
      probe: asks the engine for a token.
      num_inference: inference requests under way, from their arrival to the last byte of the answer.
    """

    def __init__(
        self,
        config: ServerConfig,
        names: tuple[str, ...],
        root: str,
        on_failure: Callable[[str], None] = lambda _: None,
    ):
        self.config, self.names, self.root = config, names, root
        self.created, self.started = int(time.time()), time.monotonic()
        self.phase, self.percent = "starting", 0
        self.service: Service | None = None
        self._failure: str | None = None
        self.is_draining = False
        self.num_inference = 0
        self.metrics = Metrics(names[0], config.metrics_prefix)
        self.tracing = None if config.otlp_traces_endpoint is None else Tracing(config.otlp_traces_endpoint, names[0])
        self.bodies = BodyReader(config.max_request_bytes, config.body_timeout)
        self.probe = DeepHealth()
        self._on_failure = on_failure

    @property
    def failure(self) -> str | None:
        """Why the server is dead, or None. It is so from the moment on at which it is known of the engine."""
        if self._failure is None and self.service is not None:
            return self.service.frontend.client.failure
        return self._failure

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "dead"
        if self.is_draining:
            return "draining"
        return "loading" if self.service is None else "ready"

    def set_phase(self, name: str, share: float) -> None:
        """Says what loading does: the phase's name and the share of it that is done. Any thread may call it."""
        self.phase, self.percent = name, round(100 * min(max(share, 0.0), 1.0))

    def ready(self, engine: ServedEngine) -> None:
        """Starts serving; call it in the event loop.

        Raises:
          ConfigError: the chat template cannot be used.
        """
        observer = self.metrics if self.tracing is None else Observers(self.metrics, self.tracing)
        self.service = Service.start(engine, self.config, self.names, observer, self.fail)
        self.metrics.watch(engine)

    def fail(self, why: str) -> None:
        """Declares the server dead."""
        if self._failure is None:
            self._failure = why
            self._on_failure(why)

    def drain(self) -> None:
        """Refuses inference requests from now on; those under way go on."""
        self.is_draining = True
        self.bodies.hurry(LAST_BODY)

    def health(self) -> HealthReply | None:
        """Why the server cannot answer now, or None when it can."""
        match self.status:
            case "ready":
                return None
            case "loading":
                return HealthReply(status="loading", phase=self.phase, percent=self.percent)
            case "draining":
                return HealthReply(status="draining")
            case "dead":
                return HealthReply(status="dead", reason=self.failure)

    async def deep_health(self) -> HealthReply | None:
        """As `health`, and besides the engine must make a token, or others' tokens, within some seconds."""
        trouble = self.health()
        if trouble is not None or self.service is None:
            return trouble
        why = await self.probe.check(self.service)
        # What has failed meanwhile is the better answer.
        return None if why is None else self.health() or HealthReply(status="stalled", reason=why)

    def overloaded(self, error: InvalidRequest) -> HttpError:
        """What HTTP says of a request that the full queue refused."""
        seconds = 1.0 if self.service is None else self.service.frontend.retry_after_seconds
        return queue_full(error.message, self.config.queue_full_status, seconds)

    def require_service(self) -> Service:
        """The service, for endpoints that do not generate.

        Raises:
          HttpError: 503 while loading and after a failure.
        """
        if self.failure is not None:
            raise unavailable(f"The server cannot answer: {self.failure}.", "engine_failed", RETRY_AFTER_DEATH)
        if self.service is None:
            raise unavailable(
                f"The model is loading: {self.phase} {self.percent}%.", "model_loading", RETRY_AFTER_LOADING
            )
        return self.service

    def require_inference(self) -> Service:
        """The service, for endpoints that generate.

        Raises:
          HttpError: 503 while loading, while draining and after a failure.
        """
        service = self.require_service()
        if self.is_draining:
            raise shutting_down()
        return service

    @contextmanager
    def counting_inference(self) -> Iterator[None]:
        self.num_inference += 1
        try:
            yield
        finally:
            self.num_inference -= 1
