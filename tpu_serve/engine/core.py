"""The step loop: plan a step, launch it, and commit the one before while the device works."""

from __future__ import annotations

import time
from typing import Any, Protocol

from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.scheduler.scheduler import Scheduler
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
    """Requests in, tokens out. Knows neither text nor arrays."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler, self.runner = scheduler, runner
        self._launched: tuple[SchedulerOutput, Any] | None = None
        self.num_steps = 0
        self.busy_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return self._launched is not None or self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request; see `Scheduler.add` for the errors."""
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        return self.scheduler.abort(request_id, reason)

    def reset(self) -> None:
        """Forgets every request and everything cached. `step` may be called again after it was cut short by an exception, which left
        pages promised but not written and launched steps that nobody will commit."""
        self._launched = None
        self.scheduler.reset()
        self.runner.reset()

    def step(self) -> list[TokenOutput]:
        """Launches the next step, then commits the previous one. Returns what the previous one brought.

        After an exception only `reset` may follow.
        """
        started = time.perf_counter()
        planned = self.scheduler.schedule()
        launched = None if planned is None else (planned, self.runner.launch(planned))
        previous, self._launched = self._launched, launched
        outputs = [] if previous is None else self.scheduler.commit(previous[0], self.runner.collect(previous[1]))
        self.num_steps += planned is not None
        self.busy_seconds += time.perf_counter() - started
        return outputs
