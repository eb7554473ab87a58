"""How long the engine takes from a batch of prompts to the first token of each, by prompt length and batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_serve.bench.driver import Driver, Run
from tpu_serve.bench.report import percentile, summary
from tpu_serve.bench.sweep import Sweep

COLUMNS = {
    "input len": "input_len",
    "batch": "batch_size",
    "steps": "num_steps",
    "median ms": "latency_ms.median",
    "p99 ms": "latency_ms.p99",
    "min ms": "latency_ms.min",
    "tokens/s": "tokens_per_second",
}


def run_prefill(driver: Driver, sweep: Sweep, on_run: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """One result per prompt length and batch size; `on_run` is called after every batch, warm-ups included."""
    results = []
    for input_len, batch_size in sweep.cases:
        runs = sweep.measure(functools.partial(driver.run, batch_size, input_len, 1), on_run)
        results.append(_result(input_len, batch_size, runs))
    return results


def _result(input_len: int, batch_size: int, runs: list[Run]) -> dict[str, Any]:
    samples_ms = [run.seconds * 1e3 for run in runs]
    return {
        "input_len": input_len,
        "batch_size": batch_size,
        "num_steps": runs[-1].num_launched,
        "num_preemptions": sum(run.num_preemptions for run in runs),
        "latency_ms": summary(samples_ms),
        "tokens_per_second": input_len * batch_size / percentile(samples_ms, 50) * 1e3,
        "samples_ms": samples_ms,
    }
