"""From outcomes to figures, by the definitions that people know from other servers' benchmarks.

Times are those of successful requests. Time to first token (TTFT) is from sending to the first chunk; inter-token latency (ITL) from each chunk
to the next, over all requests; time per output token (TPOT) is (last chunk - first chunk) / (tokens - 1) of a request, left out of the
statistics for answers of one token; end-to-end latency (E2EL) is from sending to the last chunk.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpu_serve.bench.serving.load import Load
from tpu_serve.bench.serving.outcome import Outcome
from tpu_serve.config import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Times:
    """Statistics of one metric in milliseconds; zeros without samples. `percentiles` has (percent, value) in the order asked for."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, seconds: Sequence[float], percents: Sequence[float]) -> Times:
        """Of samples in seconds. Percentiles are interpolated linearly; the deviation divides by the number of samples."""
        values = np.asarray(seconds if len(seconds) else [0.0], np.float64) * 1e3
        found = tuple((percent, float(np.percentile(values, percent))) for percent in percents)
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run.

    Attributes:
      duration: seconds from the first sending to the end of the last answer.
      total_input_tokens, total_output_tokens: of successful requests.
      goodput: successful requests per second that met every objective; None without objectives.
      peak_output: most output tokens of a second of the run, each chunk of an answer counting equally many of its tokens.
      peak_concurrency: most requests under way at one moment.
      tokens_per_chunk: output tokens per chunk, 1 where every token comes by itself.
      failures: numbers of failed requests by cause.
      times: by name of the metric.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    goodput: float | None
    peak_output: float
    peak_concurrency: int
    tokens_per_chunk: float
    failures: Mapping[str, int]
    times: Mapping[str, Times]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration


def figures(load: Load, percents: Sequence[float], objectives: Mapping[str, float] | None = None) -> Figures:
    """The figures of a run.

    Args:
      percents: which percentiles, 0 to 100.
      objectives: most milliseconds that a good request may take, by metric of `SLO_METRICS`.
    """
    good = [outcome for outcome in load.outcomes if outcome.is_success]
    samples = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [outcome.tpot for outcome in good if outcome.output_tokens > 1],
        "itl": [gap for outcome in good for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in good],
    }
    num_output = sum(max(0, outcome.output_tokens) for outcome in good)
    num_chunks = sum(len(outcome.chunk_times) for outcome in good)
    duration = max(load.seconds, 1e-9)
    goodput = None if not objectives else sum(_meets(outcome, objectives) for outcome in good) / duration
    return Figures(
        duration=duration,
        completed=len(good),
        failed=len(load.outcomes) - len(good),
        total_input_tokens=sum(outcome.prompt_tokens for outcome in good),
        total_output_tokens=num_output,
        goodput=goodput,
        peak_output=_peak_output(good, load.started),
        peak_concurrency=_peak_concurrency(load.outcomes),
        tokens_per_chunk=num_output / num_chunks if num_chunks else 0.0,
        failures=dict(Counter(outcome.cause for outcome in load.outcomes if outcome.cause is not None).most_common()),
        times={name: Times.of(values, percents) for name, values in samples.items()},
    )


def read_objectives(words: Sequence[str]) -> dict[str, float]:
    """Objectives from words like `ttft:200`, in milliseconds.

    Raises:
      ConfigError: a word names no metric, or one twice, or its value is no positive number.
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in SLO_METRICS or not number > 0:
            raise ConfigError(
                f"--goodput takes words like ttft:200 with {', '.join(SLO_METRICS)} in milliseconds, got {word!r}."
            )
        if name in found:
            raise ConfigError(f"--goodput names {name} twice.")
        found[name] = number
    return found


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    taken = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(taken[name] * 1e3 <= most for name, most in objectives.items())


def _peak_output(outcomes: Sequence[Outcome], started: float) -> float:
    seconds: Counter[int] = Counter()
    for outcome in outcomes:
        for at in outcome.chunk_times:
            # As Counter's values are meant to be whole, tokens are counted in millionths.
            seconds[int(at - started)] += round(1e6 * outcome.output_tokens / len(outcome.chunk_times))
    return max(seconds.values(), default=0) / 1e6


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    # At one moment, endings go first: a request that begins as another one ends is not beside it.
    events = sorted([(outcome.start, 1) for outcome in outcomes] + [(outcome.end, -1) for outcome in outcomes])
    return max(itertools.accumulate(step for _, step in events), default=0)
