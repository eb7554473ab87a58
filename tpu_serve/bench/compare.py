"""Two results side by side: what became better or worse, and by how much more than it varies anyway."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpu_serve.bench.result_files import read_documents
from tpu_serve.config import ConfigError

Verdict = Literal["better", "worse", "same"]
SHAPE = (
    "backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
    "num_requests", "settings",
)  # fmt: skip
"""What must agree for figures to mean the same."""
FREE_SETTINGS = frozenset({"seed", "num_runs", "num_warmups", "num_iters", "num_iters_warmup"})
"""Settings that only change how well something is measured."""
NOT_FIGURES = frozenset({
    "num_prompts", "burstiness", "max_concurrency", "num_requests", "total_input_tokens", "total_output_tokens", "total_num_tokens",
    "num_prompt_tokens", "num_output_tokens", "num_warm_up_compiles", "compiles_during", "num_preemptions", "max_concurrent_requests",
    "completed", "request_rate", "ramp_up_start_rps", "ramp_up_end_rps",
})  # fmt: skip
HIGHER = ("throughput", "goodput", "per_second", "tokens_per_s")
"""Parts of the names of figures of which more is better; of all others less is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
      before, after: medians over the runs.
      ratio: after / before; infinite where before is 0 and after is not.
      noise: by how much the ratio may lie away from 1 without meaning anything.
    """

    name: str
    before: float
    after: float
    ratio: float
    noise: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures that both results have.

    Attributes:
      num_runs: of each result.
      differences: what differs in the shape of the two, for which the caller has asked.
    """

    rows: Sequence[Row]
    num_runs: tuple[int, int]
    differences: Sequence[str]

    @property
    def num_worse(self) -> int:
        return sum(row.verdict == "worse" for row in self.rows)

    def text(self) -> str:
        """A table and a verdict."""
        lines = [f"{'':<30}{'before':>14}{'after':>14}{'ratio':>9}{'+-':>8}  verdict"]
        for row in self.rows:
            lines.append(
                f"{row.name:<30}{row.before:>14.3f}{row.after:>14.3f}{row.ratio:>9.3f}{row.noise:>8.3f}  {row.verdict}"
            )
        num_better = sum(row.verdict == "better" for row in self.rows)
        lines.append(f"runs: {self.num_runs[0]} before, {self.num_runs[1]} after")
        lines += [f"WARNING: not the same shape: {difference}" for difference in self.differences]
        if min(self.num_runs) < 2:
            lines.append(
                "WARNING: with one run there is no spread to judge by, only --threshold; --repeat 5 gives one."
            )
        same = len(self.rows) - num_better - self.num_worse
        return "\n".join([*lines, f"Verdict: {num_better} better, {self.num_worse} worse, {same} the same"])


def compare(before: Path, after: Path, threshold: float, *, allows_different: bool) -> Comparison:
    """Compares two files of any benchmark but `kernels` and `models`; several lines of JSON in a file are several runs.

    A figure has changed when its ratio is away from 1 by more than `threshold` and by more than the two half ranges of the runs together,
    and, of figures of which there are several runs of both, when their ranges do not overlap.

    Raises:
      ConfigError: a file is no result, the two have different shapes and `allows_different` does not hold, or no figure is in both.
    """
    old, new = _read(before), _read(after)
    differences = _differences(old[0], new[0])
    for path, documents in ((before, old), (after, new)):
        for document in documents[1:]:
            if inner := _differences(documents[0], document):
                raise ConfigError(f"{path} holds results of different shapes: {'; '.join(inner)}.")
    if differences and not allows_different:
        raise ConfigError(
            f"{before} and {after} do not measure the same: {'; '.join(differences)}. --allow-different compares all the same."
        )
    old_runs, new_runs = _runs(old), _runs(new)
    names = [name for name in old_runs[0] if all(name in run for run in [*old_runs, *new_runs])]
    if not names:
        raise ConfigError(f"{before} and {after} have no figure in common.")
    rows = [_row(name, [run[name] for run in old_runs], [run[name] for run in new_runs], threshold) for name in names]
    return Comparison(rows, (len(old_runs), len(new_runs)), differences)


def _row(name: str, before: Sequence[float], after: Sequence[float], threshold: float) -> Row:
    old, new = statistics.median(before), statistics.median(after)
    ratio = new / old if old else (1.0 if new == old else math.inf)
    noise = max(threshold, _half_range(before) + _half_range(after))
    has_changed = abs(ratio - 1) > noise
    if len(before) > 1 and len(after) > 1:
        has_changed &= max(before) < min(after) or max(after) < min(before)
    verdict: Verdict = "same"
    if has_changed:
        is_more_better = any(part in name for part in HIGHER)
        verdict = "better" if (new > old) == is_more_better else "worse"
    return Row(name, old, new, ratio, noise, verdict)


def _half_range(values: Sequence[float]) -> float:
    middle = abs(statistics.median(values))
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


def _read(path: Path) -> list[dict[str, Any]]:
    documents = read_documents(path)
    if not all(any(_runs([document])) for document in documents):
        raise ConfigError(f"{path} is no result of bench serve, throughput, latency, startup, prefill, decode or moe.")
    return documents


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    found = []
    kinds = (before.get("benchmark", "serve"), after.get("benchmark", "serve"))
    if kinds[0] != kinds[1]:
        found.append(f"benchmark is {kinds[0]} before and {kinds[1]} after")
    for name in SHAPE:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(key, old.get(key), new.get(key)) for key in sorted({*old, *new} - FREE_SETTINGS)]
        else:
            # Results of other programs have no settings to compare.
            pairs = [] if name == "settings" else [(name, old, new)]
        found += [f"{key} is {one!r} before and {other!r} after" for key, one, other in pairs if one != other]
    return found


def _runs(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Figures of each run of all documents: numbers that can be better or worse."""
    return [
        {
            name: float(value)
            for name, value in run.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in NOT_FIGURES
        }
        for document in documents
        for run in _repeats(document)
    ]


def _repeats(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The runs of one document, which is its only one unless it says otherwise."""
    if document.get("benchmark") == "startup":
        return _starts(document)
    if isinstance(document.get("results"), list):
        return _iterations(document["results"])
    repeats = document.get("repeats")
    if isinstance(repeats, list) and repeats:
        return repeats
    if isinstance(document.get("latencies"), list):
        percentiles = {f"p{percent}_latency": value for percent, value in document.get("percentiles", {}).items()}
        parts = {f"{name}_median": document[name]["median"] for name in ("prefill_ms", "step_ms") if document.get(name)}
        return [{"avg_latency": document.get("avg_latency"), **percentiles, **parts}]
    return [document]


def _starts(document: Mapping[str, Any]) -> list[dict[str, float]]:
    """Where there are fewer cold starts than warm ones, or more, they are taken again from the first on."""
    kinds = {kind: starts for kind in ("cold", "warm") if (starts := document.get(f"{kind}_phases"))}
    return [
        {
            f"{kind}_{name}_seconds": seconds
            for kind, starts in kinds.items()
            for name, seconds in starts[place % len(starts)].items()
        }
        for place in range(max(map(len, kinds.values()), default=0))
    ]


def _iterations(results: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The measured iterations of a sweep, each with a figure for every case."""
    cases = {f"{_case(result)} {name}": values for result in results for name, values in _samples(result).items()}
    return [
        {name: values[place] for name, values in cases.items()}
        for place in range(min(map(len, cases.values()), default=0))
    ]


def _case(result: Mapping[str, Any]) -> str:
    if "batch_size" in result:
        chunk = f" /{result['chunk']}" if "chunk" in result else ""
        return f"{result['batch_size']}x{result['input_len']}{chunk}"
    layer = result.get("layer")
    name = layer["name"] if isinstance(layer, dict) else f"{result.get('workload')} {result.get('format')}"
    return f"{name} {result.get('dtype', result.get('chip'))} {result.get('num_tokens')}"


def _samples(result: Mapping[str, Any]) -> Mapping[str, Sequence[float]]:
    """Values of each iteration by name. Steps of a batch are told by their median."""
    samples = result.get("samples", result.get("samples_ms"))
    if isinstance(samples, list):
        return {"latency_ms": samples}
    if not isinstance(samples, dict):
        values = {name: result.get(name) for name in ("fused_us", "xla_least_us")}
        return {name: [float(value)] for name, value in values.items() if value is not None}
    if "step_ms" not in samples:
        return {f"{name}_ms": values for name, values in samples.items()}
    steps, count = samples["step_ms"], len(samples["latency_ms"])
    size = len(steps) // count
    medians = [statistics.median(steps[place * size : (place + 1) * size]) for place in range(count)]
    return {**{name: samples[name] for name in ("prefill_ms", "latency_ms")}, "step_ms": medians}
