"""How long a decode step takes, by batch size, with the prefill before it kept apart.

A batch of prompts is prefilled; from the moment that every sequence has its first token, each step brings every sequence one token. Only those
full steps count: when a long prefill takes several steps, the earliest sequences run ahead and also finish first. The very last step does not
count either, because no other one is launched beside it. The prefill is measured by itself, with one token per prompt: in a longer run it
overlaps with the first decode step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tpu_serve.bench.bound import Rows
from tpu_serve.bench.driver import Driver, Run
from tpu_serve.bench.report import percentile, summary
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
    "of bound": "bound_share",
    "total ms": "latency_ms.median",
}


def run_decode(
    driver: Driver,
    sweep: Sweep,
    output_len: int,
    bound_seconds: Callable[[Rows], float],
    on_run: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """One result per prompt length and batch size.

    Args:
      bound_seconds: the least time that a step with these rows can take; that of the sequences' middle is compared with.
      on_run: called after every batch, warm-ups included.

    Raises:
      ConfigError: `output_len` is too short for a batch to ever decode as a whole.
    """
    results = []
    for input_len, batch_size in sweep.cases:

        def run(input_len: int = input_len, batch_size: int = batch_size) -> tuple[Run, Run]:
            return driver.run(batch_size, input_len, 1), driver.run(batch_size, input_len, output_len)

        bound = bound_seconds([(input_len + output_len // 2, 1)] * batch_size)
        results.append(_result(input_len, output_len, batch_size, sweep.measure(run, on_run), bound * 1e3))
    return results


def full_steps(run: Run, batch_size: int) -> list[float]:
    """Seconds of each step in which every sequence of the batch got a token that was not its first. Those of one launch count alike."""
    seen: set[str] = set()
    seconds = []
    for previous, step in itertools.pairwise(run.steps):
        seen.update(previous.request_ids)
        if len(seen) == len(step.request_ids) == batch_size and step.launched:
            num_steps = step.num_tokens // batch_size
            seconds += [(step.at - previous.at) / num_steps] * num_steps
    return seconds


def _result(
    input_len: int, output_len: int, batch_size: int, runs: list[tuple[Run, Run]], bound_ms: float
) -> dict[str, Any]:
    prefill_ms = [prefill.seconds * 1e3 for prefill, _ in runs]
    latency_ms = [run.seconds * 1e3 for _, run in runs]
    step_ms = [seconds * 1e3 for _, run in runs for seconds in full_steps(run, batch_size)]
    if not step_ms:
        raise ConfigError(
            f"With --output-len {output_len} a batch of {batch_size} never decodes as a whole: its prefill takes "
            f"{runs[-1][0].num_launched} steps. Raise --output-len or --max-num-batched-tokens."
        )
    return {
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "num_preemptions": sum(run.num_preemptions for pair in runs for run in pair),
        "prefill_ms": summary(prefill_ms),
        "step_ms": summary(step_ms),
        "latency_ms": summary(latency_ms),
        "tokens_per_second": batch_size * len(step_ms) / sum(step_ms) * 1e3,
        "bound_ms": bound_ms,
        "bound_share": bound_ms / percentile(step_ms, 50),
        "samples": {"prefill_ms": prefill_ms, "step_ms": step_ms, "latency_ms": latency_ms},
    }
