"""How long the engine takes from a batch of prompts to the first token of each, by prompt length, batch size and tokens of a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tpu_serve.bench.bound import Rows
from tpu_serve.bench.driver import Driver, Run
from tpu_serve.bench.report import percentile, summary
from tpu_serve.bench.sweep import Sweep

COLUMNS = {
    "chunk": "chunk",
    "input len": "input_len",
    "batch": "batch_size",
    "steps": "num_steps",
    "median ms": "latency_ms.median",
    "p99 ms": "latency_ms.p99",
    "min ms": "latency_ms.min",
    "tokens/s": "tokens_per_second",
    "of bound": "bound_share",
}


def run_prefill(
    driver: Driver, sweep: Sweep, bound_seconds: Callable[[Rows], float], on_run: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """One result per chunk, prompt length and batch size.

    Args:
      bound_seconds: the least time that a step with these rows can take.
      on_run: called after every batch, warm-ups included.
    """
    limit = driver.core.scheduler.max_num_batched_tokens
    results = []
    for chunk in sweep.chunks:
        driver.core.scheduler.limit_step(chunk or limit)
        for input_len, batch_size in sweep.cases:
            runs = sweep.measure(functools.partial(driver.run, batch_size, input_len, 1), on_run)
            results.append(_result(chunk or limit, input_len, batch_size, runs, bound_seconds))
    driver.core.scheduler.limit_step(limit)
    return results


def _result(
    chunk: int, input_len: int, batch_size: int, runs: list[Run], bound_seconds: Callable[[Rows], float]
) -> dict[str, Any]:
    samples_ms = [run.seconds * 1e3 for run in runs]
    bound_ms = math.fsum(bound_seconds(rows) for rows in runs[-1].launches) * 1e3
    median = percentile(samples_ms, 50)
    return {
        "chunk": chunk,
        "input_len": input_len,
        "batch_size": batch_size,
        "num_steps": runs[-1].num_launched,
        "num_preemptions": sum(run.num_preemptions for run in runs),
        "latency_ms": summary(samples_ms),
        "tokens_per_second": input_len * batch_size / median * 1e3,
        "bound_ms": bound_ms,
        "bound_share": bound_ms / median,
        "samples_ms": samples_ms,
    }
