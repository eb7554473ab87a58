"""What the server can do at the moment: loading, ready, draining or dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from tpu_serve.config import ServerConfig
from tpu_serve.engine.engine import Engine
from tpu_serve.server.errors import unavailable
from tpu_serve.server.fanout import shutting_down
from tpu_serve.server.metrics import Metrics
from tpu_serve.server.replies import HealthReply
from tpu_serve.server.service import Service

Status = Literal["loading", "ready", "draining", "dead"]
RETRY_AFTER_LOADING = 5
RETRY_AFTER_DEATH = 30


class ServerState:
    """The one mutable object of the server; lives in the event loop's thread.

    Args:
      config: of the endpoint.
      names: names of the model that requests may use.
      root: where the model comes from.
      on_failure: called once with a sentence when the engine fails while it runs.

    Attributes:
      service: None until the engine is ready.
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
        self.created = int(time.time())
        self.phase, self.percent = "starting", 0
        self.service: Service | None = None
        self._failure: str | None = None
        self.is_draining = False
        self.num_inference = 0
        self.metrics = Metrics(names[0])
        self._on_failure = on_failure

    @property
    def failure(self) -> str | None:
        """Why the server is dead, or None. It is so from the moment on at which the engine's thread knows."""
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

    def ready(self, engine: Engine) -> None:
        """Starts serving; call it in the event loop.

        Raises:
          ConfigError: the chat template cannot be used.
        """
        self.service = Service.start(engine, self.config, self.names, self.metrics, self.fail)
        self.metrics.watch(engine)

    def fail(self, why: str) -> None:
        """Declares the server dead."""
        if self._failure is None:
            self._failure = why
            self._on_failure(why)

    def drain(self) -> None:
        """Refuses inference requests from now on; those under way go on."""
        self.is_draining = True

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
