"""`bench kernels --compiled`: what the TPU compiler makes of the fused kernel, cell by cell, on a machine without a TPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_serve.bench.compiled.report import CompileWorkerFailed, report
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2 import cases
from tpu_serve.kernels.fused_moe_v2.bound import bound
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import smem_bytes, supports, vmem_bytes

TARGET = "tpu_serve.bench.fused_moe:program"
NOTE = (
    "Compiled for the named chips and modelled from the compiled schedule; nothing here was measured on a TPU. "
    "Bytes and bundles are exact for uniform routing, microseconds are a model; the bound is calculated."
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cells: every combination of the named things that the cases know.

    Attributes:
      chips, workloads, formats, tokens, device_counts: see `cases.problems`; formats None for all that a chip runs.
      mode: "D" or "G" where it is asked for, else the heuristic's.
    """

    chips: tuple[str, ...] = ("v5e", "v6e", "tpu7x")
    workloads: tuple[str, ...] = tuple(cases.WORKLOADS)
    formats: tuple[str, ...] | None = None
    tokens: tuple[int, ...] = cases.TOKENS
    device_counts: tuple[int, ...] = cases.DEVICE_COUNTS
    mode: str | None = None


def check(selection: Selection) -> list[cases.Case]:
    """The cells of a selection.

    Raises:
      ConfigError: it names something unknown, or is empty.
    """
    known = {
        "--chip": (selection.chips, tuple(TPU_CHIPS)),
        "--workload": (selection.workloads, tuple(cases.WORKLOADS)),
        "--format": (selection.formats or (), tuple(FORMATS)),
        "--num-devices": (selection.device_counts, tuple(sorted({1, 2, *cases.DEVICE_COUNTS}))),
    }
    for option, (given, names) in known.items():
        for name in given:
            if name not in names:
                raise ConfigError(f"{option} {name} is unknown; known are {', '.join(map(str, names))}.")
    found = [
        case
        for chip in selection.chips
        for case in cases.problems(
            chip, selection.workloads, selection.tokens, selection.device_counts, selection.formats
        )
    ]
    if not found:
        raise ConfigError("nothing to do: none of the workloads is run in that --format on that --chip.")
    return found


@dataclass(slots=True)
class Row:
    """One cell of the table.

    Attributes:
      outcome: "compiled", "refused" (by `supports` or for want of a legal config, with the reason) or "failed" (the compiler's words).
      found: the report's figures; see `compiled.report`.
    """

    case: cases.Case
    outcome: str
    reason: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.case.label, "workload": self.case.workload, "chip": self.case.chip,
            "problem": dataclasses.asdict(self.case.problem), "outcome": self.outcome, "reason": self.reason,
            "config": self.config, "report": self.found,
        }  # fmt: skip


def run_cell(case: cases.Case, mode: str | None, timeout_s: float) -> Row:
    """Asks `supports`, chooses a config, compiles and reads one cell."""
    chip, p = TPU_CHIPS[case.chip], case.problem
    if (reason := supports(p, chip)) is not None:
        return Row(case, "refused", reason)
    try:
        config = heuristic(p, chip, mode)
    except ValueError as error:
        return Row(case, "refused", str(error))
    chosen = {**dataclasses.asdict(config), "vmem_bytes": vmem_bytes(p, config), "smem_bytes": smem_bytes(p, config)}
    arguments = {"chip": case.chip, "workload": case.workload, "num_tokens": p.num_tokens, "format": p.format}
    if mode is not None:
        arguments["config"] = {"mode": mode}
    try:
        found = report(TARGET, arguments, case.chip, p.num_devices, timeout_s)
    except CompileWorkerFailed as error:
        return Row(case, "failed", str(error), chosen)
    if found["error"] is not None:
        return Row(case, "failed", found["error"], chosen, found)
    return Row(case, "compiled", "", chosen, found)


def sweep(
    cells: Sequence[cases.Case], mode: str | None, timeout_s: float, num_jobs: int, tell: Callable[[Row], None]
) -> Iterator[Row]:
    """All cells in order, `num_jobs` compilers at a time; `tell` hears of each row as it is ready."""

    def one(case: cases.Case) -> Row:
        row = run_cell(case, mode, timeout_s)
        tell(row)
        return row

    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            yield from pool.map(one, cells)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


COLUMNS = (
    "cell", "mode", "tiles", "VMEM MiB", "model us", "bound us", "ratio", "by", "HBM MB", "ICI MB", "MXU", "hot MXU", "hot spills",
    "temp MiB", "s",
)  # fmt: skip


def line(row: Row) -> tuple[str, ...]:
    """A row's cells as text, in the order of `COLUMNS`."""
    p, found, config = row.case.problem, row.found, row.config
    label = row.case.label
    if row.outcome != "compiled":
        return (label, row.outcome, row.reason, *[""] * (len(COLUMNS) - 3))
    kernels = [kernel for kernel in found["kernels"].values() if "error" not in kernel]
    main = found["kernels"].get(found["main_kernel"], {})
    hot = main.get("hottest_loop") or {}
    least = bound(p, TPU_CHIPS[row.case.chip])
    tiles = f"F{config['tile_columns']} x{config['ring_slots']}"
    mode = config["mode"]
    if mode == "G":
        tiles += f" M{config['block_rows']}/{config['tile_rows']}"
        mode += f" {config['dispatch']} {config['combine']}"
    return (
        label, mode, tiles, f"{config['vmem_bytes'] / MIB:.0f}",
        f"{found['modelled_us']:.0f}", f"{least.seconds * 1e6:.0f}", f"{found['modelled_us'] / least.seconds / 1e6:.2f}", least.limit,
        f"{sum(kernel['hbm_bytes'] for kernel in kernels) / 1e6:.1f}", f"{sum(kernel['ici_bytes'] for kernel in kernels) / 1e6:.1f}",
        f"{main.get('mxu_busy', 0):.0%}", f"{hot.get('mxu_busy', 0):.0%}", f"{hot.get('spills', 0)}",
        f"{found['temporary_bytes'] / MIB:.1f}", f"{found['compile_seconds']:.0f}",
    )  # fmt: skip


def text(rows: Sequence[Row]) -> str:
    """The table, and what it is."""
    lines = [COLUMNS, *(line(row) for row in rows)]
    tables = [entry for entry in lines if entry[1] not in ("refused", "failed")]
    widths = [max(len(entry[column]) for entry in tables) for column in range(len(COLUMNS))]
    out = []
    for entry in lines:
        if entry[1] in ("refused", "failed"):
            out.append(f"{entry[0]}  {entry[1]}: {entry[2]}")
        else:
            out.append("  ".join(value.ljust(width) for value, width in zip(entry, widths, strict=True)).rstrip())
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("compiled", "refused", "failed")}
    out.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return "\n".join([*out, NOTE])


def write(rows: Sequence[Row], file: Path) -> None:
    file.write_text(json.dumps({"note": NOTE, "rows": [row.as_json() for row in rows]}, indent=1) + "\n")
