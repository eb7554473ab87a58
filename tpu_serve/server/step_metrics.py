"""Metrics of the engine's steps."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tpu_serve.engine.reading import StepRecord
from tpu_serve.engine.served import ServedEngine
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
        self._num_tokens = self._num_places = 0
        seconds = families.labelled_histogram(
            "step_time_seconds",
            "A step of the engine, from the launch of the next one to its commit, by what its rows are: chunks of prompts, single tokens, or both",
            STEP_TIME,
            "kind",
        )
        self._seconds = {kind: seconds.labels(*labels, kind) for kind in KINDS}
        families.add(self)

    def watch(self, engine: ServedEngine) -> None:
        """Follows the engine's steps from now on."""
        engine.follow_steps(self._on_step)

    def _on_step(self, step: StepRecord) -> None:
        for _ in range(step.num_steps):  # those of one launch count alike
            self._seconds[step.kind].observe(step.seconds / step.num_steps)
        if step.num_places:
            self._num_tokens += step.num_tokens
            self._num_places += step.num_places

    def collect(self) -> Iterator[Metric]:
        num_places, num_tokens = self._num_places, self._num_tokens
        yield self._reading.gauge(
            "padded_tokens_ratio",
            "Share of padding in what the steps so far computed, 0 to 1",
            max(0.0, 1 - num_tokens / num_places) if num_places else 0.0,
        )
