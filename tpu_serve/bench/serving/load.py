"""Sends prompts at their times and collects the outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

from tpu_serve.bench.serving.outcome import Outcome
from tpu_serve.bench.serving.prompts import Prompt


class Asked(Protocol):
    """Answers one prompt; `Target` is one."""

    async def ask(self, prompt: Prompt, number: int = 0) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Load:
    """What a run sent and got.

    Attributes:
      outcomes: one per prompt, in their order.
      started: when the run began, on the clock of the outcomes.
      seconds: from then until the last answer was over.
    """

    outcomes: Sequence[Outcome]
    started: float
    seconds: float


async def send_all(
    target: Asked,
    prompts: Sequence[Prompt],
    delays: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Load:
    """Sends each prompt at its delay after now, and later when `max_concurrency` are under way: the time that a request waits for that is
    not part of its figures. `on_done` is called after every answer."""
    limit = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(number: int, prompt: Prompt) -> Outcome:
        async with limit or nullcontext():
            outcome = await target.ask(prompt, number)
        on_done()
        return outcome

    started = time.perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []
    try:
        for number, (prompt, delay) in enumerate(zip(prompts, delays, strict=True)):
            left = started + delay - time.perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            tasks.append(asyncio.create_task(one(number, prompt)))
        outcomes = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return Load(outcomes, started, time.perf_counter() - started)
