"""Compiling the programs of cells, each in a process of its own, and what was found about them."""

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
from tpu_serve.bench.models.cells import Cell

COMPILED, REFUSED, FAILED = "compiled", "refused", "failed"


@dataclass(frozen=True, slots=True)
class Program:
    """What was found about a cell's program: see `worker.answer`; of one that did not end, "error" alone.

    Attributes:
      outcome: "compiled", "refused" (by a ConfigError, before anything was compiled) or "failed".
    """

    cell: Cell
    found: Mapping[str, Any]

    @property
    def outcome(self) -> str:
        if self.found["error"] is None:
            return COMPILED
        return REFUSED if self.found.get("refusal") else FAILED

    def as_json(self) -> dict[str, Any]:
        return {**self.cell.as_json(), "context": self.cell.step.context, "outcome": self.outcome, **self.found}


def run_cell(cell: Cell, timeout_s: float, stop: threading.Event | None = None, folder: Path | None = None) -> Program:
    """Compiles and reads one program in a fresh process.

    Args:
      stop: ends it early, with a result that is of no use.
      folder: an empty one, in which the program's text and the compiler's dump stay.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-serve-models-") as temporary:
        dump = folder or Path(temporary) / "dump"
        dump.mkdir(exist_ok=True)
        request, answer = Path(temporary) / "request.json", Path(temporary) / "answer.json"
        asked = cell.as_json() | {"dump_folder": str(dump.resolve()), "keep_text": folder is not None}
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
            return Program(cell, {"error": why})
        if not answer.exists():
            lines = said.strip().splitlines()[-3:]
            return Program(cell, {"error": f"exit {process.returncode}: {' '.join(lines)}"[:600]})
        return Program(cell, json.loads(answer.read_text()))


def sweep(cells: Sequence[Cell], timeout_s: float, num_jobs: int) -> Generator[Program]:
    """The programs as they are ready, `num_jobs` compilers at a time, which are stopped when the caller wants no more."""
    stop = threading.Event()
    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            for future in as_completed([pool.submit(run_cell, cell, timeout_s, stop) for cell in cells]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
