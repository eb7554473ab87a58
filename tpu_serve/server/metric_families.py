"""Families of metrics: declared once, shown under every prefix."""

from __future__ import annotations

import copy
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

LABELS = ("model_name", "engine")
"""Of every metric but those of HTTP and of the process."""
OWN_PREFIX = "tpu_serve"

TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TO_NEXT_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TIME = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_TOKENS = tuple(float(number) for number in (1, *(2**power for power in range(3, 15))))
HTTP_DURATION = (0.1, 0.5, 1.0)
HTTP_DURATION_FINE = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """Numbers that begin with 1, 2 or 5, up to the longest sequence."""
    steps = (float(digit * 10**power) for power in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= max_model_len)


class Families(Collector):
    """Metrics of one model, by names without a prefix.

    Args:
      labels: values of `LABELS`.
      prefixes: every family is shown once under each of them.
    """

    def __init__(self, labels: tuple[str, str], prefixes: Sequence[str]):
        self._labels, self._prefixes = labels, tuple(dict.fromkeys(prefixes))
        self._sources: list[Counter | Histogram | Collector] = []

    def counter(self, name: str, help: str) -> Counter:
        return self.labelled_counter(name, help).labels(*self._labels)

    def labelled_counter(self, name: str, help: str, *more: str) -> Counter:
        """With further labels; the caller gives the values of all of them."""
        counter = Counter(name, help, (*LABELS, *more), registry=None)
        self._sources.append(counter)
        return counter

    def histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return self.labelled_histogram(name, help, buckets).labels(*self._labels)

    def labelled_histogram(self, name: str, help: str, buckets: Sequence[float], *more: str) -> Histogram:
        """As `labelled_counter`."""
        histogram = Histogram(name, help, (*LABELS, *more), buckets=buckets, registry=None)
        self._sources.append(histogram)
        return histogram

    def bulk_histogram(self, name: str, help: str, buckets: Sequence[float]) -> BulkHistogram:
        histogram = BulkHistogram(self._labels, name, help, buckets)
        self._sources.append(histogram)
        return histogram

    def add(self, collector: Collector) -> None:
        """Further families, made when they are asked for."""
        self._sources.append(collector)

    def collect(self) -> Iterator[Metric]:
        families = [family for source in self._sources for family in source.collect()]
        for prefix in self._prefixes:
            yield from (_prefixed(family, prefix) for family in families)


class BulkHistogram(Collector):
    """A histogram that takes many equal observations as one, which the library's cannot. One thread may observe.

    Args:
      labels: values of `LABELS`.
      buckets: upper bounds in rising order, without infinity.
    """

    def __init__(self, labels: tuple[str, str], name: str, help: str, buckets: Sequence[float]):
        self._labels, self._name, self._help = labels, name, help
        self._bounds = (*buckets, math.inf)
        self._counts, self._sum, self._created = [0] * len(self._bounds), 0.0, time.time()

    def observe(self, value: float, count: int = 1) -> None:
        """So many observations of a value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=LABELS)
        totals = accumulate(self._counts)
        buckets = [(floatToGoString(bound), float(total)) for bound, total in zip(self._bounds, totals, strict=True)]
        family.add_metric(self._labels, buckets, self._sum)
        family.add_sample(f"{self._name}_created", dict(zip(LABELS, self._labels, strict=True)), self._created)
        yield family


class Reading:
    """Makes families of values that are read at the time of a scrape."""

    def __init__(self, labels: tuple[str, str]):
        self._labels = labels

    def gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def gauges(
        self, name: str, help: str, more: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
    ) -> Metric:
        """One gauge for each (values of the further labels, value)."""
        family = GaugeMetricFamily(name, help, labels=(*LABELS, *more))
        for further, value in values:
            family.add_metric((*self._labels, *further), value)
        return family

    def counters(self, name: str, help: str, more: str, values: Iterable[tuple[str, float]]) -> Metric:
        """One counter for each (value of the further label, value)."""
        family = CounterMetricFamily(name, help, labels=(*LABELS, more))
        for further, value in values:
            family.add_metric((*self._labels, further), value)
        return family


def _prefixed(family: Metric, prefix: str) -> Metric:
    named = copy.copy(family)
    named.name = f"{prefix}:{family.name}"
    named.samples = [sample._replace(name=f"{prefix}:{sample.name}") for sample in family.samples]
    return named
