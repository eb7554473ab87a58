"""How long a decode step takes, by batch size, with the prefill before it kept apart.

A batch of prompts is prefilled; from the moment that every sequence has its first token, each step brings every sequence one token. Only those
full steps count: when a long prefill takes several steps, the earliest sequences run ahead and also finish first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tpu_serve.bench.driver import Driver, Run
from tpu_serve.bench.report import summary
from tpu_serve.bench.sweep import Sweep
from tpu_serve.config import ConfigError

COLUMNS = {
    "batch": "batch_size",
    "input len": "input_len",
    "output len": "output_len",
    "prefill ms": "prefill_ms.median",
    "step ms": "step_ms.median",
    "p99": "step_ms.p99",
    "min": "step_ms.min",
    "decode tokens/s": "tokens_per_second",
    "total ms": "latency_ms.median",
}


def run_decode(
    driver: Driver, sweep: Sweep, output_len: int, on_run: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """One result per prompt length and batch size; `on_run` is called after every batch, warm-ups included.

    Raises:
      ConfigError: `output_len` is too short for a batch to ever decode as a whole.
    """
    results = []
    for input_len, batch_size in sweep.cases:
        runs = sweep.measure(functools.partial(driver.run, batch_size, input_len, output_len), on_run)
        results.append(_result(input_len, output_len, batch_size, runs))
    return results


def split(run: Run, batch_size: int) -> tuple[float, list[float]]:
    """(seconds until every sequence has its first token, seconds of each full step after that)."""
    seen: set[str] = set()
    prefill, steps = None, []
    for previous, step in zip([None, *run.steps], run.steps, strict=False):
        if prefill is not None and previous is not None and len(step.request_ids) == batch_size:
            steps.append(step.at - previous.at)
        seen.update(step.request_ids)
        if prefill is None and len(seen) == batch_size:
            prefill = step.at
    assert prefill is not None, "a finished batch has all its first tokens"
    return prefill, steps


def _result(input_len: int, output_len: int, batch_size: int, runs: list[Run]) -> dict[str, Any]:
    parts = [split(run, batch_size) for run in runs]
    step_ms = [seconds * 1e3 for _, steps in parts for seconds in steps]
    if not step_ms:
        raise ConfigError(
            f"With --output-len {output_len} a batch of {batch_size} never decodes as a whole: its prefill takes {runs[-1].num_launched} "
            f"steps. Raise --output-len or --max-num-batched-tokens."
        )
    prefill_ms = [prefill * 1e3 for prefill, _ in parts]
    latency_ms = [run.seconds * 1e3 for run in runs]
    return {
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "num_preemptions": sum(run.num_preemptions for run in runs),
        "prefill_ms": summary(prefill_ms),
        "step_ms": summary(step_ms),
        "latency_ms": summary(latency_ms),
        "tokens_per_second": batch_size * len(step_ms) / sum(step_ms) * 1e3,
        "samples": {"prefill_ms": prefill_ms, "step_ms": step_ms, "latency_ms": latency_ms},
    }
