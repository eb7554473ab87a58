"""Runs an engine core in a thread of its own and carries requests in and outputs out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from tpu_serve.engine.core import EngineCore
from tpu_serve.request import FinishReason, Request, TokenOutput

logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine has failed and serves nothing any more."""


class RequestFailed(RuntimeError):
    """One request could not be finished; the engine goes on."""


class EngineClient:
    """The only way to an engine core once it runs.

    Args:
      core: owned by the client's thread from now on.
      on_outputs: called in that thread with the outputs of each step; must return quickly and not raise.
      on_failure: called once, in that thread, with a sentence, when the engine fails. Every live request has got an ERROR output by then.
    """

    def __init__(
        self,
        core: EngineCore,
        on_outputs: Callable[[list[TokenOutput]], None],
        on_failure: Callable[[str], None] = lambda _: None,
    ):
        self.core, self._on_outputs, self._on_failure = core, on_outputs, on_failure
        self.failure: str | None = None
        self._inbox: deque[Request | tuple[str, FinishReason]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._live: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self.failure is None and not self._closing

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet, those still in the inbox included."""
        return len(self.core.scheduler.waiting) + len(self._inbox)

    @property
    def num_running(self) -> int:
        return len(self.core.scheduler.running)

    def submit(self, request: Request) -> None:
        """Hands a request to the engine; its outputs come through `on_outputs`.

        Raises:
          EngineDead: the engine has failed or is closed.
        """
        with self._wake:
            if not self.is_alive:
                raise EngineDead(self.failure or "the engine is closed")
            self._inbox.append(request)
            self._wake.notify()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request soon; harmless when it has finished already. No output follows for it."""
        with self._wake:
            self._inbox.append((request_id, reason))
            self._wake.notify()

    def close(self) -> None:
        """Stops the thread after the step under way. Unfinished requests get an ABORT output."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._deliver(self.core.step())
        except Exception as error:
            logger.exception("The engine failed")
            self._end_all(FinishReason.ERROR, f"the engine failed: {type(error).__name__}")
        else:
            self._end_all(FinishReason.ABORT, None)

    def _take_inbox(self) -> bool:
        """Takes what has come in, waiting for it when the engine is idle; False when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._closing or self.core.has_work):
                self._wake.wait()
            messages = list(self._inbox)
            self._inbox.clear()
            if self._closing:
                self._inbox.extend(messages)
                return False
        for message in messages:
            if isinstance(message, Request):
                self._add(message)
            else:
                request_id, reason = message
                self.core.abort(request_id, reason)
                self._live.discard(request_id)
        return True

    def _add(self, request: Request) -> None:
        try:
            self.core.add(request)
            self._live.add(request.id)
        except ValueError as error:  # this request's failure ends this request only
            self._deliver([TokenOutput(request_id=request.id, finish_reason=FinishReason.ERROR, error=str(error))])

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        if outputs:
            self._live.difference_update(output.request_id for output in outputs if output.finish_reason)
            self._on_outputs(outputs)

    def _end_all(self, reason: FinishReason, why: str | None) -> None:
        with self._wake:
            self.failure = why
            self._live.update(message.id for message in self._inbox if isinstance(message, Request))
            self._inbox.clear()
        self._deliver([TokenOutput(request_id=name, finish_reason=reason, error=why) for name in sorted(self._live)])
        if why is not None:
            self._on_failure(why)
