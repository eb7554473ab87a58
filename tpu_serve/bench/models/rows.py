"""What was found about programs, finding it, and what follows for the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_serve.bench.compiled.report import words_of
from tpu_serve.bench.compiled.topology import ENVIRONMENT
from tpu_serve.bench.models.cells import Cell, Job, all_layers
from tpu_serve.bench.models.whole import Extrapolation

COMPILED, REFUSED, FAILED = "compiled", "refused", "failed"


@dataclass(frozen=True, slots=True)
class Program:
    """What was found about a job: see `worker.answer`; of one that did not end, "error" alone.

    Attributes:
      outcome: "compiled", "refused" (by a ConfigError, before anything was compiled) or "failed".
    """

    job: Job
    found: Mapping[str, Any]

    @property
    def outcome(self) -> str:
        if self.found["error"] is None:
            return COMPILED
        return REFUSED if self.found.get("refusal") else FAILED


def run_job(job: Job, timeout_s: float, stop: threading.Event | None = None, folder: Path | None = None) -> Program:
    """Compiles and reads one program in a fresh process.

    Args:
      stop: ends it early, with a result that is of no use.
      folder: an empty one, in which the program's text and the compiler's dump stay.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-serve-models-") as temporary:
        dump = folder or Path(temporary) / "dump"
        dump.mkdir(exist_ok=True)
        request, answer = Path(temporary) / "request.json", Path(temporary) / "answer.json"
        asked = job.as_json() | {"dump_folder": str(dump.resolve()), "keep_text": folder is not None}
        request.write_text(json.dumps(asked))
        search = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with subprocess.Popen(
            [sys.executable, "-m", "tpu_serve.bench.models.worker", str(request), str(answer)],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": search},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            said = words_of(process, timeout_s, stop)
        if said is None:
            why = "stopped" if stop and stop.is_set() else f"no answer after {timeout_s:g} s"
            return Program(job, {"error": why})
        if not answer.exists():
            lines = said.strip().splitlines()[-3:]
            return Program(job, {"error": f"exit {process.returncode}: {' '.join(lines)}"[:600]})
        return Program(job, json.loads(answer.read_text()))


def sweep(jobs: Sequence[Job], timeout_s: float, num_jobs: int) -> Generator[Program]:
    """The programs as they are ready, `num_jobs` compilers at a time, which are stopped when the caller wants no more."""
    stop = threading.Event()
    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            for future in as_completed([pool.submit(run_job, job, timeout_s, stop) for job in jobs]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Row:
    """A cell, calculated for all layers.

    Attributes:
      outcome: as of its programs; "missing" where not all of them are there.
      reason: why there are no figures.
      figures: see `figures`; empty without.
    """

    cell: Cell
    outcome: str
    reason: str
    figures: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        cell = self.cell
        return {
            "model": cell.model, "slice": cell.slice.name, "num_devices": cell.slice.num_devices, "phase": cell.step.phase,
            "num_tokens": cell.step.num_tokens, "context": cell.step.context, "outcome": self.outcome, "reason": self.reason,
            **self.figures,
        }  # fmt: skip


def row_of(cell: Cell, jobs: Sequence[Job], programs: Mapping[Job, Program]) -> Row:
    """The row of a cell, of whose jobs some may be missing."""
    missing = [job for job in jobs if job not in programs]
    bad = [programs[job] for job in jobs if job in programs and programs[job].outcome != COMPILED]
    if bad:
        return Row(cell, bad[0].outcome, bad[0].found["error"], {})
    if missing:
        return Row(cell, "missing", f"{len(missing)} of {len(jobs)} programs are not compiled", {})
    return Row(cell, COMPILED, "", figures(cell, [programs[job] for job in jobs]))


def figures(cell: Cell, programs: Sequence[Program]) -> dict[str, Any]:
    """Of the whole model, from compiled programs.

    Returns:
      programs: layers of each; is_whole: whether nothing had to be calculated from fewer layers; memory, moe: see `worker.answer`;
      bytes: "temporaries", "code", "arguments"; seconds: "trace" and "compile" by the wall and of processors, of all layers, and
      compile_seconds_of_layer of processors by kind; step_us, by_part, by_origin, waiting_us, hbm_bytes, ici_bytes: see `timeline.Walk`;
      collectives: by "part/operation" [how many run, bytes]; collectives_of_layer the same by kind; bound_us, bound_by, bound_seconds,
      least_bytes: see `bound.Least`; unread, unknown, loops: names in any of the programs.
    """
    pattern = all_layers(cell.model)
    extrapolation = Extrapolation([program.job.layers for program in programs], pattern)
    found = [program.found for program in programs]
    whole = extrapolation.whole
    walks = [one["walk"] for one in found]
    operations = dict.fromkeys(name for walk in walks for name in walk["collectives"])

    def collective(name: str, place: int) -> list[float]:
        return [walk["collectives"].get(name, (0.0, 0.0))[place] for walk in walks]

    bounds = {name: whole([one["bound"]["seconds"][name] for one in found]) for name in found[0]["bound"]["seconds"]}
    limit = max(bounds, key=bounds.__getitem__)
    return {
        "programs": [list(program.job.layers) for program in programs],
        "is_whole": extrapolation.is_whole,
        "memory": found[-1]["memory"],
        "moe": found[-1]["moe"],
        "bytes": {
            name: round(whole([one["bytes"][name] for one in found])) for name in ("arguments", "temporaries", "code")
        },
        "seconds": {
            phase: [round(whole([one["seconds"][phase][place] for one in found]), 1) for place in range(2)]
            for phase in ("trace", "compile")
        },
        "compile_seconds_of_layer": _rounded(extrapolation.of_layers([one["seconds"]["compile"][1] for one in found])),
        "step_us": round(whole([walk["us"] for walk in walks]), 1),
        "by_part": _rounded(extrapolation.counters([walk["by_part"] for walk in walks])),
        "by_origin": _rounded(extrapolation.counters([walk["by_origin"] for walk in walks])),
        "waiting_us": round(whole([walk["waiting_us"] for walk in walks]), 1),
        "hbm_bytes": round(whole([walk["hbm_bytes"] for walk in walks])),
        "ici_bytes": round(whole([walk["ici_bytes"] for walk in walks])),
        "collectives": {
            name: [round(whole(collective(name, 0)), 2), round(whole(collective(name, 1)))] for name in operations
        },
        "collectives_of_layer": {
            kind: {
                name: [round(extrapolation.of_layers(collective(name, place))[kind], 2) for place in range(2)]
                for name in operations
                if round(extrapolation.of_layers(collective(name, 0))[kind], 2)
            }
            for kind in extrapolation.of_layers([0.0] * len(found))
        },
        "bound_us": round(bounds[limit] * 1e6, 1),
        "bound_by": limit,
        "bound_seconds": bounds,
        "least_bytes": {
            name: round(whole([one["bound"][name] for one in found])) for name in ("weight_bytes", "cache_bytes")
        },
        **{name: sorted({item for walk in walks for item in walk[name]}) for name in ("unread", "unknown", "loops")},
    }  # fmt: skip


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}
