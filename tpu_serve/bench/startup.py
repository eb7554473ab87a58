"""How long an engine takes to start, each time in a process of its own. This module imports no jax: the devices are the children's."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.config import ConfigError, EngineConfig

PHASES = ("import", "config", "tokenizer", "weights", "measure", "compile", "ready", "first_token")
"""What a start consists of, in order. Programs are begun before weights are read; `compile` is what was left of that when the weights were there, and
what it takes to run each program once. `import` begins when the process is made, `ready` is the time from there until the engine can be asked, and
`first_token` from there until it answered a prompt of one token."""
COLD_SECONDS = 3600
Run = Callable[[Mapping[str, Any]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds by phase of every cold and every warm start."""

    model_id: str
    cold: Sequence[Mapping[str, float]]
    warm: Sequence[Mapping[str, float]]

    def text(self) -> str:
        """A table in seconds: medians, with the range where there are several."""
        lines = [f"bench startup: {self.model_id}", f"{'seconds':<14}{'cold':>24}{'warm':>24}"]
        for phase in PHASES:
            cells = [_cell([start[phase] for start in starts if phase in start]) for starts in (self.cold, self.warm)]
            if any(cells):
                lines.append(f"{phase.replace('_', ' '):<14}{cells[0]:>24}{cells[1]:>24}")
        for name, starts in (("Cold", self.cold), ("Warm", self.warm)):
            if starts:
                lines.append(
                    f"{name} startup time: {statistics.median(start['ready'] for start in starts):.2f} seconds"
                )
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        found: dict[str, Any] = {"benchmark": "startup", "model_id": self.model_id}
        for name, starts in (("cold", self.cold), ("warm", self.warm)):
            found[f"{name}_startup_times"] = [start["ready"] for start in starts]
            found[f"{name}_phases"] = [dict(start) for start in starts]
            if starts:
                found[f"avg_{name}_startup_time"] = statistics.fmean(start["ready"] for start in starts)
                found[f"avg_{name}_compilation_time"] = statistics.fmean(start.get("compile", 0.0) for start in starts)
        return found


def bench_startup(
    config: EngineConfig,
    num_cold: int,
    num_warmup: int,
    num_warm: int,
    on_run: Callable[[], None],
    run: Run | None = None,
) -> Startup:
    """Starts engines and stops them.

    Args:
      num_cold: starts with an empty folder of compiled programs each.
      num_warmup: starts that fill the folder for the warm ones, not measured.
      num_warm: starts with what is in the folder: the one of `--compile-cache-dir`, or the user's.
      on_run: called after every start.
      run: starts one engine with these options; a process unless it is given.

    Raises:
      ConfigError: an engine could not start.
    """
    options, run = config.non_default(), run or start_once
    if num_warm and config.compile.cache_folder is None:
        raise ConfigError("--compile-cache-dir off leaves nothing warm: say --num-iters-warm 0.")

    def once(**more: Any) -> Mapping[str, float]:
        found = run({**options, **more})
        on_run()
        return found

    cold = []
    for _ in range(num_cold):
        with tempfile.TemporaryDirectory(prefix="tpu-serve-cold-") as folder:
            cold.append(once(compile_cache_dir=folder))
    for _ in range(num_warmup):
        once()
    return Startup(config.model.source, cold, [once() for _ in range(num_warm)])


def start_once(options: Mapping[str, Any]) -> Mapping[str, float]:
    """Starts one engine in a process of its own; seconds by phase.

    Raises:
      ConfigError: it could not start; the message is the process's own.
    """
    spawned = time.time()
    command = [sys.executable, "-m", "tpu_serve.bench.startup_child", json.dumps(options), repr(spawned)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COLD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"The engine did not start within {COLD_SECONDS} seconds.") from None
    try:
        found = json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        found = None
    if isinstance(found, dict):
        if "error" in found:
            raise ConfigError(str(found["error"]))
        return found
    tail = " ".join(done.stderr.strip().splitlines()[-3:])
    raise ConfigError(f"The engine did not start, its process ended with {done.returncode}: {tail}")


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f}-{max(values):.2f})"
