"""Metrics of the engine's steps, told by its own thread."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tpu_serve.engine.engine import Engine
from tpu_serve.runner.buckets import pick
from tpu_serve.scheduler.step import SchedulerOutput
from tpu_serve.server.metric_families import STEP_TIME, Families, Reading

KINDS = ("prefill", "decode", "mixed")


class StepMetrics(Collector):
    """How long steps take, and how much of them is padding.

    Args:
      labels: values of `metric_families.LABELS`.
      families: where its metrics are shown.
    """

    def __init__(self, labels: tuple[str, str], families: Families):
        self._reading = Reading(labels)
        self._buckets: tuple[int, ...] = ()
        self._num_tokens = self._num_places = 0
        seconds = families.labelled_histogram(
            "step_time_seconds",
            "A step of the engine, from the launch of the next one to its commit, by what its rows are: chunks of prompts, single tokens, or both",
            STEP_TIME,
            "kind",
        )
        self._seconds = {kind: seconds.labels(*labels, kind) for kind in KINDS}
        families.add(self)

    def watch(self, engine: Engine) -> None:
        """Follows the engine's steps from now on."""
        self._buckets = engine.buckets
        engine.core.on_step = self._on_step

    def _on_step(self, output: SchedulerOutput, seconds: float) -> None:
        ends = [
            row.length for rows in output.by_rank for row in rows[:1] + rows[-1:]
        ]  # rows with a single token come first
        kind = "prefill" if min(ends) > 1 else "decode" if max(ends) == 1 else "mixed"
        for _ in range(output.num_steps):  # those of one launch count alike
            self._seconds[kind].observe(seconds / output.num_steps)
        if self._buckets:
            self._num_tokens += output.num_tokens_in_all
            in_a_step = len(output.by_rank) * pick(self._buckets, output.num_tokens_of_largest)
            self._num_places += output.num_steps * in_a_step

    def collect(self) -> Iterator[Metric]:
        num_places, num_tokens = self._num_places, self._num_tokens
        yield self._reading.gauge(
            "padded_tokens_ratio",
            "Share of padding in what the steps so far computed, 0 to 1",
            max(0.0, 1 - num_tokens / num_places) if num_places else 0.0,
        )
