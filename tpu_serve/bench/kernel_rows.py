"""What was found about cells, and finding it with several compilers at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.bench.compiled.report import CompileWorkerFailed, report
from tpu_serve.bench.kernel_cells import Cell


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about a cell.

    Attributes:
      mode: the kernel's mode that was asked for, None if the choice was left to it.
      outcome: "compiled", "refused" (by the kernel, with the reason) or "failed" (the compiler's words).
      config: see `Kernel.config`.
      found: the report's figures; see `compiled.report`.
    """

    cell: Cell
    mode: str | None
    outcome: str
    reason: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        case = self.cell.case
        return {
            "kernel": self.cell.kernel.name, "label": case.label, "mode": self.mode, "workload": case.workload,
            "chip": case.chip, "backend": case.backend, "problem": dataclasses.asdict(case.problem), "outcome": self.outcome,
            "reason": self.reason, "config": self.config, "report": self.found,
        }  # fmt: skip


def run_cell(cell: Cell, mode: str | None, timeout_s: float, stop: threading.Event | None = None) -> Row:
    """Asks the kernel, compiles and reads one cell; `stop` ends it early, with a row that is of no use."""
    kernel, case = cell.kernel, cell.case
    if (reason := kernel.refusal(case, mode)) is not None:
        return Row(cell, mode, "refused", reason)
    config = kernel.config(case, mode)
    target, arguments = kernel.target(case, mode)
    try:
        found = report(target, arguments, case.chip, case.num_devices, timeout_s, stop=stop)
    except CompileWorkerFailed as error:
        return Row(cell, mode, "failed", str(error), config)
    if found["error"] is not None:
        return Row(cell, mode, "failed", found["error"], config, found)
    return Row(cell, mode, "compiled", "", config, found)


def sweep(cells: Sequence[Cell], mode: str | None, timeout_s: float, num_jobs: int) -> Generator[Row]:
    """The rows of all cells as they are ready, `num_jobs` compilers at a time, which are stopped when the caller wants no more."""
    stop = threading.Event()
    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            for future in as_completed([pool.submit(run_cell, cell, mode, timeout_s, stop) for cell in cells]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
