"""The result as people read it and scripts grep it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_serve.bench.serving.figures import Figures
from tpu_serve.bench.serving.server_metrics import ServerSide

WIDTH = 50
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def block(
    found: Figures,
    *,
    metrics: Sequence[str],
    max_concurrency: int | None,
    request_rate: float,
    server: ServerSide | None,
    title: str = "Serving Benchmark Result",
) -> str:
    """Labels to column 40, values in 10 more, as in the table that users know; what others do not print comes after it.

    Args:
      metrics: which of `TITLES` are shown.
      request_rate: requests per second, shown when finite.
      server: what the server said; None when it says nothing.
    """
    lines = [_ruled(f" {title} ", "=")]
    lines += [_whole("Successful requests:", found.completed), _whole("Failed requests:", found.failed)]
    if max_concurrency is not None:
        lines.append(_whole("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        lines.append(_number("Request rate configured (RPS):", request_rate))
    lines += [
        _number("Benchmark duration (s):", found.duration),
        _whole("Total input tokens:", found.total_input_tokens),
        _whole("Total generated tokens:", found.total_output_tokens),
        _number("Request throughput (req/s):", found.request_throughput),
    ]
    if found.goodput is not None:
        lines.append(_number("Request goodput (req/s):", found.goodput))
    lines += [
        _number("Output token throughput (tok/s):", found.output_throughput),
        _number("Peak output token throughput (tok/s):", found.peak_output),
        _number("Peak concurrent requests:", found.peak_concurrency),
        _number("Total token throughput (tok/s):", found.total_throughput),
    ]
    for name in metrics:
        lines += _times(found, name)
    lines += _server_lines(found, server, shows_client="ttft" in metrics)
    if found.failures:
        lines.append(_ruled("Failures by cause", "-"))
        lines += [_whole(f"{cause}:", count) for cause, count in found.failures.items()]
    return "\n".join([*lines, "=" * WIDTH])


def spread_table(runs: Sequence[Mapping[str, Any]], spread: Mapping[str, Mapping[str, float]]) -> str:
    """Median and range of every figure over several runs, and half the range in percent of the median."""
    lines = [
        f"{f' Spread over {len(runs)} runs ':=^{2 * WIDTH}}",
        f"{'':<30}{'median':>14}{'min':>14}{'max':>14}{'+- %':>10}",
    ]
    for name, range_ in spread.items():
        median = statistics.median(run[name] for run in runs)
        half = (range_["max"] - range_["min"]) / 2 / abs(median) * 100 if median else 0.0
        lines.append(f"{name:<30}{median:>14.2f}{range_['min']:>14.2f}{range_['max']:>14.2f}{half:>10.1f}")
    return "\n".join([*lines, "=" * 2 * WIDTH])


def _times(found: Figures, name: str) -> list[str]:
    short, long = TITLES[name]
    times = found.times[name]
    lines = [
        _ruled(long, "-"),
        _number(f"Mean {short} (ms):", times.mean),
        _number(f"Median {short} (ms):", times.median),
    ]
    return lines + [_number(f"P{percent:g} {short} (ms):", value) for percent, value in times.percentiles]


def _server_lines(found: Figures, server: ServerSide | None, *, shows_client: bool) -> list[str]:
    """The server's own figures, those of the client beside them."""
    lines = [_ruled("Server side", "-"), _number("Output tokens per chunk:", found.tokens_per_chunk)]
    if server is None:
        return [*lines, "The server has no /metrics to read."]
    for label, value, decimals in (
        ("Server mean TTFT (ms):", server.mean_ttft_ms, 2),
        (
            "Client mean TTFT (ms):",
            found.times["ttft"].mean if shows_client and server.mean_ttft_ms is not None else None,
            2,
        ),
        ("Server median TTFT (ms, from buckets):", server.p50_ttft_ms, 2),
        ("Server P99 TTFT (ms, from buckets):", server.p99_ttft_ms, 2),
        ("Server mean queue time (ms):", server.mean_queue_ms, 2),
        ("Server mean prefill time (ms):", server.mean_prefill_ms, 2),
        ("KV cache hit rate (%):", None if server.kv_hit_rate is None else server.kv_hit_rate * 100, 2),
        ("Preemptions during the run:", server.num_preemptions, 0),
        ("Programs compiled during the run:", server.num_compiled, 0),
    ):
        if value is not None:
            lines.append(f"{label:<40} {value:<10.{decimals}f}".rstrip())
    return lines


def _ruled(title: str, rule: str) -> str:
    return f"{title:{rule}^{WIDTH}}"


def _whole(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}".rstrip()


def _number(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}".rstrip()
