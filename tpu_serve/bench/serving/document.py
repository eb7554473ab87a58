"""The result as a file: the keys that tools for other servers' benchmarks read, and what only this one knows."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_serve import __version__
from tpu_serve.bench.serving.figures import Figures
from tpu_serve.bench.serving.run import Plan, Result
from tpu_serve.bench.serving.target import Target


def document(
    target: Target, plan: Plan, results: Sequence[Result], *, tokenizer_id: str, label: str | None, metadata: Mapping[str, str],
    metrics: Sequence[str], is_detailed: bool, about: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One benchmark as JSON values.

    Figures of several runs are their medians, each figure by itself, but `failed` is that of the worst run; `repeats` has the runs and
    `spread` their range then. Details are those of the first run. `about` is what `Target.about` found.
    """
    runs = [run_figures(result.figures, metrics) for result in results]
    first = results[0]
    found: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": label,
        "model_id": target.model,
        "tokenizer_id": tokenizer_id,
        "num_prompts": plan.num_prompts,
        **metadata,
        "request_rate": plan.arrivals.rate if math.isfinite(plan.arrivals.rate) else "inf",
        "burstiness": plan.arrivals.burstiness,
        "max_concurrency": plan.max_concurrency,
    }
    if plan.arrivals.ramp_up is not None:
        found |= {
            "ramp_up_strategy": plan.arrivals.ramp_up,
            "ramp_up_start_rps": plan.arrivals.start_rate,
            "ramp_up_end_rps": plan.arrivals.end_rate,
        }
    found |= _medians(runs)
    found |= {
        "failed": max(run["failed"] for run in runs),
        "failures": _added([result.figures.failures for result in results]),
        "server": None if first.server is None else _medians([_server(result) for result in results]),
        "num_warm_up_compiles": first.num_warm_up_compiles,
        "settings": _settings(target, plan),
        "client_versions": {"tpu_serve": __version__, "python": platform.python_version()},
        **about,
    }
    if len(runs) > 1:
        found |= {"repeats": runs, "spread": spread(runs)}
    if is_detailed:
        found |= _details(first)
    return found


def run_figures(found: Figures, metrics: Sequence[str]) -> dict[str, Any]:
    """The figures of one run by their usual names."""
    flat: dict[str, Any] = {
        "duration": found.duration,
        "completed": found.completed,
        "failed": found.failed,
        "total_input_tokens": found.total_input_tokens,
        "total_output_tokens": found.total_output_tokens,
        "request_throughput": found.request_throughput,
        "request_goodput": found.goodput,
        "output_throughput": found.output_throughput,
        "total_token_throughput": found.total_throughput,
        "max_output_tokens_per_s": found.peak_output,
        "max_concurrent_requests": found.peak_concurrency,
        "tokens_per_chunk": found.tokens_per_chunk,
    }
    for name in metrics:
        times = found.times[name]
        flat |= {f"mean_{name}_ms": times.mean, f"median_{name}_ms": times.median, f"std_{name}_ms": times.std}
        flat |= {f"p{percent:g}_{name}_ms": value for percent, value in times.percentiles}
    return flat


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Smallest and largest value and standard deviation of every figure over several runs."""
    found = {}
    for name in runs[0]:
        values = [run[name] for run in runs if isinstance(run[name], int | float)]
        if len(values) == len(runs) > 1:
            found[name] = {"min": min(values), "max": max(values), "std": statistics.stdev(values)}
    return found


def write(path: Path, found: Mapping[str, Any], *, appends: bool) -> None:
    """Writes one line of JSON, or adds it to the file. Raises `OSError`."""
    with path.open("a" if appends else "w", encoding="utf-8") as file:
        if appends and file.tell():
            file.write("\n")
        json.dump(found, file)


def file_name(target: Target, plan: Plan, label: str | None) -> str:
    """What a result is called when nobody says: label or backend, rate, concurrency, model and time."""
    rate = f"{plan.arrivals.rate:g}qps" if plan.arrivals.ramp_up is None else f"ramp-up-{plan.arrivals.ramp_up}"
    concurrency = "" if plan.max_concurrency is None else f"-concurrency{plan.max_concurrency}"
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{label or target.backend}-{rate}{concurrency}-{target.model.rstrip('/').split('/')[-1]}-{now}.json"


def _settings(target: Target, plan: Plan) -> dict[str, Any]:
    dataset = dataclasses.asdict(plan.dataset)
    return {
        "dataset": {**dataset, "path": None if plan.dataset.path is None else str(plan.dataset.path)},
        "seed": plan.seed,
        "num_runs": plan.num_runs,
        "num_warmups": plan.num_warmups,
        "ignore_eos": target.ignore_eos,
        "streams": target.streams,
        "endpoint": target.endpoint,
        "extra_body": dict(target.fields),
        "goodput_ms": dict(plan.objectives),
    }


def _server(result: Result) -> dict[str, Any]:
    return {} if result.server is None else dataclasses.asdict(result.server)


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(runs) == 1:
        return dict(runs[0])
    found: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs if run.get(name) is not None]
        middle = statistics.median(values) if values else None
        is_whole = isinstance(middle, float) and middle.is_integer() and all(isinstance(value, int) for value in values)
        found[name] = int(middle) if is_whole and middle is not None else middle
    return found


def _added(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for mapping in counts:
        for name, count in mapping.items():
            found[name] = found.get(name, 0) + count
    return found


def _details(result: Result) -> dict[str, Any]:
    outcomes = result.load.outcomes
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [max(0, outcome.output_tokens) if outcome.is_success else 0 for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
