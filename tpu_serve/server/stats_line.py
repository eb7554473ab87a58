"""One line in the log every few seconds that says what the engine does, in the words that people grep for."""

from __future__ import annotations

import dataclasses

from tpu_serve.scheduler.data_parallel import AnyScheduler


class StatsLine:
    """Compares the scheduler's counters with those of the line before."""

    def __init__(self, scheduler: AnyScheduler):
        self._scheduler = scheduler
        self._before = dataclasses.replace(scheduler.stats)

    def take(self, seconds: float) -> str | None:
        """The line for the last `seconds`; None when nothing ran and nothing waits."""
        scheduler, before = self._scheduler, self._before
        now = self._before = dataclasses.replace(scheduler.stats)
        num_prompt = now.prompt_tokens_computed - before.prompt_tokens_computed
        num_generated = now.generated - before.generated
        if not (num_prompt or num_generated or scheduler.running or scheduler.waiting):
            return None
        num_preemptions = now.num_preemptions - before.num_preemptions
        preemptions = f"Preemptions: {num_preemptions}, " if num_preemptions else ""
        hit_rate = now.prefix_hits / now.prefix_queries if now.prefix_queries else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s, Running: {len(scheduler.running)} reqs, "
            f"Waiting: {len(scheduler.waiting)} reqs, {preemptions}KV cache usage: {scheduler.cache.usage:.1%}, "
            f"Prefix cache hit rate: {hit_rate:.1%}"
        )
