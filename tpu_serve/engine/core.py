"""The step loop: plan a step, launch it, and commit the one before while the device works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.scheduler.data_parallel import AnyScheduler
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput


class Runner(Protocol):
    """What the step loop needs of a model runner; tests put a fake here. A ticket is a launched step that is not yet collected."""

    def launch(self, output: SchedulerOutput) -> Any:
        """Starts a step on the device and returns its ticket at once."""

    def collect(self, ticket: Any) -> list[SampledToken | None]:
        """Waits for a step; one entry per scheduled row."""

    def reset(self) -> None:
        """Can launch again after a step that was cut short; what was cached on the device may be lost."""

    @property
    def compile_count(self) -> int:
        """Programs compiled so far; constant once the runner is ready."""


class EngineCore:
    """Requests in, tokens out. Knows neither text nor arrays.

    Attributes:
      num_steps: steps launched; a launch may hold several.
      busy_seconds: time spent in `step`.
      on_step: called, in the thread of `step`, with a step that has been committed and the seconds of the call of `step` that did it.
      on_news: called in any thread when `has_work` may have become true without `add`.

    Args:
      largest_step: called before each step is planned, for the most tokens that it may have (of one data rank), which never fall; any number
        when left out.
    """

    def __init__(self, scheduler: AnyScheduler, runner: Runner, largest_step: Callable[[], int] | None = None):
        self.scheduler, self.runner, self._largest_step = scheduler, runner, largest_step
        self._failure: Exception | None = None
        self._is_news = False
        self.on_news: Callable[[], None] = lambda: None
        self._launched: tuple[SchedulerOutput, Any] | None = None
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.on_step: Callable[[SchedulerOutput, float], None] = lambda output, seconds: None

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._launched is not None or self.scheduler.has_work or self._failure is not None or self._is_news

    def fail(self, error: Exception) -> None:
        """Makes the next call of `step` raise this, and each after it. Any thread may call it."""
        self._failure = self._failure or error
        self.on_news()

    def look_again(self) -> None:
        """Makes `has_work` true until the next step has asked how large it may be. Any thread may call it."""
        self._is_news = True
        self.on_news()

    def add(self, request: Request) -> None:
        """Queues a request; see `Scheduler.add` for the errors."""
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        return self.scheduler.abort(request_id, reason)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix that no sequence holds; False when some are held and stay."""
        return self.scheduler.reset_prefix_cache()

    def reset(self) -> None:
        """Forgets every request and everything cached. `step` may be called again after it was cut short by an exception, which left
        pages promised but not written and launched steps that nobody will commit."""
        self._launched = None
        self.scheduler.reset()
        self.runner.reset()

    def step(self) -> list[TokenOutput]:
        """Launches the next step, then commits the previous one. Returns what the previous one brought.

        Where a sequence cannot go on without its last token, the previous step is committed first: half of the steps would pass it over
        otherwise. After an exception only `reset` may follow.
        """
        started = time.perf_counter()
        self._is_news = False
        if self._failure is not None:
            raise self._failure
        if self._largest_step is not None:
            self.scheduler.limit_step(self._largest_step())
        previous, outputs, is_committed = self._launched, [], False
        if previous is not None and self.scheduler.needs_last_tokens:
            outputs, is_committed = self.scheduler.commit(previous[0], self.runner.collect(previous[1])), True
        planned = self.scheduler.schedule()
        self._launched = None if planned is None else (planned, self.runner.launch(planned))
        if previous is not None and not is_committed:
            outputs = self.scheduler.commit(previous[0], self.runner.collect(previous[1]))
        self.num_steps += 0 if planned is None else planned.num_steps
        seconds = time.perf_counter() - started
        self.busy_seconds += seconds
        if previous is not None:
            self.on_step(previous[0], seconds)
        return outputs
