"""Runs an engine core in a thread of its own and carries requests in and outputs out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from tpu_serve.engine.core import EngineCore
from tpu_serve.request import FinishReason, Request, TokenOutput

logger = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine has failed and serves nothing any more."""


class RequestFailed(RuntimeError):
    """One request could not be finished; the engine goes on."""


@dataclass(slots=True)
class _Abort:
    request_id: str
    reason: FinishReason


@dataclass(slots=True)
class _Call:
    """Something to do between two steps, and who waits for it."""

    function: Callable[[EngineCore], bool]
    done: Future[bool] = field(default_factory=Future)

    def run(self, core: EngineCore) -> None:
        if self.done.set_running_or_notify_cancel():
            try:
                self.done.set_result(self.function(core))
            except BaseException as error:
                self.done.set_exception(error)
                raise


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
        self._inbox: deque[Request | _Abort | _Call] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._live: set[str] = set()
        core.on_news = self._notify
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self.failure is None and not self._closing

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet, those still in the inbox included."""
        with self._wake:
            num_incoming = sum(isinstance(message, Request) for message in self._inbox)
        return len(self.core.scheduler.waiting) + num_incoming

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those requests."""
        with self._wake:
            incoming = [message for message in self._inbox if isinstance(message, Request)]
        return self.core.scheduler.num_waiting_tokens + sum(len(request.prompt_token_ids) for request in incoming)

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
            self._inbox.append(_Abort(request_id, reason))
            self._wake.notify()

    def reset_prefix_cache(self) -> Future[bool]:
        """Forgets every cached prefix that no request holds, between two steps. The result is False when some are held and stay.

        Raises:
          EngineDead: the engine has failed or is closed; the future raises it where that happens before its turn.
        """
        call = _Call(EngineCore.reset_prefix_cache)
        with self._wake:
            if not self.is_alive:
                raise EngineDead(self.failure or "the engine is closed")
            self._inbox.append(call)
            self._wake.notify()
        return call.done

    def close(self) -> None:
        """Stops the thread after the step under way. Unfinished requests get an ABORT output."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._deliver(self.core.step())
                self._end_turn()
        except Exception as error:
            logger.exception("The engine failed")
            self._end_all(FinishReason.ERROR, f"the engine failed: {type(error).__name__}")
        else:
            self._end_all(FinishReason.ABORT, None)

    def _end_turn(self) -> None:
        """Called after each step, and the outputs of it. For subclasses."""

    def _take_inbox(self) -> bool:
        """Takes what has come in, waiting for it when the engine is idle; False when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._closing or self.core.has_work):
                self._wake.wait()
            if self._closing:
                return False
            num_messages = len(self._inbox)
        for _ in range(num_messages):  # one by one: should one fail, the others hear of it
            with self._wake:
                message = self._inbox.popleft()
            if isinstance(message, Request):
                self._add(message)
            elif isinstance(message, _Call):
                message.run(self.core)
            else:
                self.core.abort(message.request_id, message.reason)
                self._live.discard(message.request_id)
        return True

    def _add(self, request: Request) -> None:
        self._live.add(request.id)
        try:
            self.core.add(request)
        except ValueError as error:  # this request's failure ends this request only
            self._deliver([TokenOutput(request_id=request.id, finish_reason=FinishReason.ERROR, error=str(error))])

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        if outputs:
            self._live.difference_update(output.request_id for output in outputs if output.finish_reason)
            self._on_outputs(outputs)

    def _end_all(self, reason: FinishReason, why: str | None) -> None:
        with self._wake:
            self.failure = why
            messages = list(self._inbox)
            self._inbox.clear()
        self._live.update(message.id for message in messages if isinstance(message, Request))
        for message in messages:
            if isinstance(message, _Call) and message.done.set_running_or_notify_cancel():
                message.done.set_exception(EngineDead(why or "the engine is closed"))
        self._deliver([TokenOutput(request_id=name, finish_reason=reason, error=why) for name in sorted(self._live)])
        if why is not None:
            self._on_failure(why)
