"""One line in the log every few seconds that says what the engine does, in the words that people grep for."""

from __future__ import annotations

from collections.abc import Callable

from tpu_serve.engine.reading import Reading


class StatsLine:
    """Compares the engine's counters with those of the line before."""

    def __init__(self, read: Callable[[], Reading]):
        self._read = read
        self._before = read().stats

    def take(self, seconds: float) -> str | None:
        """The line for the last `seconds`; None when nothing ran and nothing waits."""
        reading, before = self._read(), self._before
        now = self._before = reading.stats
        num_prompt = now.prompt_tokens_computed - before.prompt_tokens_computed
        num_generated = now.generated - before.generated
        if not (num_prompt or num_generated or reading.num_running or reading.num_waiting):
            return None
        num_preemptions = now.num_preemptions - before.num_preemptions
        preemptions = f"Preemptions: {num_preemptions}, " if num_preemptions else ""
        hit_rate = now.prefix_hits / now.prefix_queries if now.prefix_queries else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s, Running: {reading.num_running} reqs, "
            f"Waiting: {reading.num_waiting} reqs, {preemptions}KV cache usage: {reading.cache_usage:.1%}, "
            f"Prefix cache hit rate: {hit_rate:.1%}"
        )
