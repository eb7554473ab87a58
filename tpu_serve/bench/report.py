"""What a benchmark found: percentiles, a table for the screen, a JSON document with everything needed to judge the figures."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from tpu_serve import __version__
from tpu_serve.config import EngineConfig, engine_options
from tpu_serve.device.chip import chip_of
from tpu_serve.engine.intake import ModelInfo


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the samples lie, interpolated linearly between neighbours.

    Raises:
      ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Minimum, median, mean and 99th percentile, by those names."""
    return {
        "min": min(samples),
        "median": percentile(samples, 50),
        "mean": math.fsum(samples) / len(samples),
        "p99": percentile(samples, 99),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """Where the figures were obtained.

    Attributes:
      versions: of this package, jax, jaxlib, numpy and Python.
      device: platform and kind as JAX reports them, how many were used, and which chip that is.
    """

    versions: Mapping[str, str]
    device: Mapping[str, Any]

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> Environment:
        """Of this process, for figures obtained on `devices`, which are all of one kind."""
        first = devices[0]
        versions = {
            "tpu_serve": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
        device = {
            "platform": first.platform,
            "kind": first.device_kind,
            "count": len(devices),
            "chip": chip_of(first).name,
        }
        return cls(versions, device)

    def __str__(self) -> str:
        device = self.device
        return (
            f"{device['count']} x {device['kind']} (platform {device['platform']}, chip {device['chip']}), "
            f"jax {self.versions['jax']}, tpu-serve {self.versions['tpu_serve']}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one benchmark.

    Attributes:
      benchmark: its name.
      settings: what was asked: sweeps, iterations, seed.
      config: the engine's options.
      info: the model.
      num_compiles_before: programs compiled by the time the engine was ready.
      num_compiles_during: programs compiled while it was measured; anything but 0 spoils the figures.
      results: one mapping per case, holding plain values, summaries and raw samples.
      columns: what the table shows: heading -> path into a result, with dots.
      bound: the rates that shares of the bound were calculated with; `bound_note` says them.
    """

    benchmark: str
    settings: Mapping[str, Any]
    environment: Environment
    config: EngineConfig
    info: ModelInfo
    num_compiles_before: int
    num_compiles_during: int
    results: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]
    bound: Mapping[str, Any]
    bound_note: str

    def warnings(self) -> list[str]:
        """Reasons to distrust the figures."""
        found = []
        if self.num_compiles_during:
            found.append(
                f"{self.num_compiles_during} programs were compiled while measuring: the figures include compile time."
            )
        if any(result.get("num_preemptions") for result in self.results):
            found.append("Sequences were preempted while measuring: the KV cache was too small for some batches.")
        return found

    def text(self) -> str:
        """The table, between a line that says where it was measured and the warnings."""
        head = f"bench {self.benchmark}: {self.info.name} on {self.environment}"
        rows = [[_cell(_at(result, path)) for path in self.columns.values()] for result in self.results]
        body = table(list(self.columns), rows)
        compiles = f"compiled programs: {self.num_compiles_before} before, {self.num_compiles_during} while measuring"
        bound = f"of bound: the least time, calculated from bytes and products at {self.bound_note}, as a share of the median"
        return "\n".join([head, "", body, "", bound, compiles, *(f"WARNING: {warning}" for warning in self.warnings())])

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        info = {
            "name": self.info.name,
            "architecture": self.info.architecture,
            "num_params": self.info.num_params,
            "max_model_len": self.info.max_model_len,
            "vocab_size": self.info.vocab_size,
        }
        return {
            "benchmark": self.benchmark,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": dict(self.environment.versions),
            "device": dict(self.environment.device),
            "model": info,
            "engine_options": {name: getattr(getattr(self.config, part), name) for part, name, _ in engine_options()},
            "settings": dict(self.settings),
            "bound": dict(self.bound),
            "compiles": {"before": self.num_compiles_before, "during": self.num_compiles_during},
            "warnings": self.warnings(),
            "results": [dict(result) for result in self.results],
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right, two spaces apart, under a ruled heading."""
    widths = [max(len(line[place]) for line in [headings, *rows]) for place in range(len(headings))]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _at(result: Mapping[str, Any], path: str) -> Any:
    value: Any = result
    for key in path.split("."):
        value = value[key]
    return value


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"
