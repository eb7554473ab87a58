"""What the server itself says of a run: differences of its Prometheus metrics, read before and after."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

PREFIXES = ("tpu_serve:", "vllm:")
"""Of names; the first that the server has is read."""
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Samples by name without the prefix and labels, summed over models and engines."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def read(cls, text: str) -> Snapshot:
        """From the text format of Prometheus. Lines that are none are left out."""
        prefix = next((prefix for prefix in PREFIXES if f"\n{prefix}" in f"\n{text}"), PREFIXES[0])
        values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found is None or not found[1].startswith(prefix):
                continue
            labels = tuple(
                sorted(pair for pair in _LABEL.findall(found[2] or "") if pair[0] not in ("model_name", "engine"))
            )
            try:
                value = float(found[3])
            except ValueError:
                continue
            key = (found[1].removeprefix(prefix), labels)
            values[key] = values.get(key, 0.0) + value
        return cls(values)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have these labels, None without any."""
        wanted = set(labels.items())
        found = [value for (key, pairs), value in self.values.items() if key == name and wanted <= set(pairs)]
        return math.fsum(found) if found else None

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound."""
        found: dict[float, float] = {}
        for (key, pairs), value in self.values.items():
            bound = dict(pairs).get("le")
            if key == f"{name}_bucket" and bound is not None:
                found[float(bound)] = found.get(float(bound), 0.0) + value
        return found


@dataclass(frozen=True, slots=True)
class ServerSide:
    """A run as the server saw it; None where it does not tell. Other clients' requests in between are in it too.

    Attributes:
      mean_ttft_ms, p50_ttft_ms, p99_ttft_ms: from arrival to the first token; percentiles interpolated within the histogram's buckets.
      mean_queue_ms: from arrival to the first step.
      mean_prefill_ms: from the first step to the first token.
      num_compiled: programs compiled or fetched meanwhile; anything but 0 spoils the figures.
      kv_hit_rate: share of prompt tokens found in the prefix cache, 0 to 1.
      num_preemptions: sequences that lost their pages.
      generated_tokens: of all answers.
    """

    mean_ttft_ms: float | None = None
    p50_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_queue_ms: float | None = None
    mean_prefill_ms: float | None = None
    num_compiled: int | None = None
    kv_hit_rate: float | None = None
    num_preemptions: int | None = None
    generated_tokens: int | None = None


def between(before: Snapshot, after: Snapshot) -> ServerSide:
    """What happened between two readings."""
    queries, hits = _rise(before, after, "prefix_cache_queries_total"), _rise(before, after, "prefix_cache_hits_total")
    counts = (
        _rise(before, after, "compile_total", phase="serving"),
        _rise(before, after, "num_preemptions_total"),
        _rise(before, after, "generation_tokens_total"),
    )
    num_compiled, num_preemptions, generated = (None if count is None else round(count) for count in counts)
    return ServerSide(
        mean_ttft_ms=_mean_ms(before, after, "time_to_first_token_seconds"),
        p50_ttft_ms=_percentile_ms(before, after, "time_to_first_token_seconds", 50),
        p99_ttft_ms=_percentile_ms(before, after, "time_to_first_token_seconds", 99),
        mean_queue_ms=_mean_ms(before, after, "request_queue_time_seconds"),
        mean_prefill_ms=_mean_ms(before, after, "request_prefill_time_seconds"),
        num_compiled=num_compiled,
        kv_hit_rate=None if hits is None or not queries else hits / queries,
        num_preemptions=num_preemptions,
        generated_tokens=generated,
    )


def _rise(before: Snapshot, after: Snapshot, name: str, **labels: str) -> float | None:
    end = after.total(name, **labels)
    return None if end is None else end - (before.total(name, **labels) or 0.0)


def _mean_ms(before: Snapshot, after: Snapshot, name: str) -> float | None:
    total, count = _rise(before, after, f"{name}_sum"), _rise(before, after, f"{name}_count")
    return None if total is None or not count else total / count * 1e3


def _percentile_ms(before: Snapshot, after: Snapshot, name: str, percent: float) -> float | None:
    """Linear within the bucket, as Prometheus' `histogram_quantile`; the last finite bound for what lies above it."""
    old = before.buckets(name)
    bounds = sorted((bound, count - old.get(bound, 0.0)) for bound, count in after.buckets(name).items())
    if not bounds or bounds[-1][1] <= 0:
        return None
    rank, low, below = bounds[-1][1] * percent / 100, 0.0, 0.0
    for bound, count in bounds:
        if count >= rank and count > below:
            return (low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)) * 1e3
        low, below = (low if math.isinf(bound) else bound), count
    return low * 1e3
