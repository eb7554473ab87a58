"""One mixture-of-experts layer on TPUs that are not here, by token count: the fused kernel compiled and modelled, beside the least time of XLA's way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpu_serve.bench.compiled.machine import CORES
from tpu_serve.bench.kernel_cells import Cell
from tpu_serve.bench.kernel_rows import Row as KernelRow
from tpu_serve.bench.report import table
from tpu_serve.device.chip import TPU_CHIPS, Chip, slice_grid
from tpu_serve.kernels.fused_moe_v2.bound import fewest_links
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.traffic import xla_traffic

HEADINGS = (
    "layer",
    "format",
    "slice",
    "tokens",
    "fused us",
    "its bound us",
    "XLA us at least",
    "XLA's way",
    "fused/XLA",
    "why not",
)
NOTE = (
    "The fused kernel's time is modelled from its compiled schedule. XLA's is the least that its bytes allow at the chip's published rates, calculated "
    "and never reached: a ratio below 1 says that the kernel is faster whatever XLA does. Nothing here was measured on a TPU."
)
_XLA_PATHS = ("dense", "ragged")


@dataclass(frozen=True, slots=True)
class CompiledRow:
    """A layer at a token count on a slice.

    Attributes:
      fused_us: modelled; None where the kernel cannot run, or the compiler failed, which `reason` says.
      bound_us: the least that any schedule of the kernel can take.
      xla_path: the way of XLA that moves the fewest bytes, and `xla_least_us` what these take.
    """

    workload: str
    format: str
    chip: str
    num_devices: int
    num_tokens: int
    outcome: str
    reason: str
    fused_us: float | None
    bound_us: float | None
    xla_path: str
    xla_least_us: float

    @property
    def ratio(self) -> float | None:
        """The kernel's modelled time in times of XLA's least."""
        return None if self.fused_us is None else self.fused_us / self.xla_least_us

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def compiled_rows(
    cells: Sequence[Cell], run: Callable[[Cell], KernelRow], on_row: Callable[[], None] = lambda: None
) -> list[CompiledRow]:
    """Compiles cells of `fused_moe_v2` by `run`, one after the other; `on_row` is called after each."""
    rows = []
    for cell in cells:
        case = cell.case
        found = run(cell)
        path, least_us = xla_least(case.problem, TPU_CHIPS[case.chip])
        rows.append(
            CompiledRow(
                case.workload, case.problem.format, case.chip, case.num_devices, case.problem.num_tokens, found.outcome, found.reason,
                found.found.get("modelled_us"), found.found.get("bound_us"), path, least_us,
            )
        )  # fmt: skip
        on_row()
    return rows


def xla_least(problem: Problem, chip: Chip) -> tuple[str, float]:
    """Which of XLA's ways moves its bytes the fastest, and the microseconds of that: memory and links at their published rates, side by side."""
    grid = slice_grid(chip, problem.num_devices) or (1,)
    links = fewest_links(grid) * CORES[chip.name].mesh_links * chip.link_bytes_per_second / chip.devices_per_chip
    times = {}
    for path in _XLA_PATHS:
        moved = xla_traffic(problem, path)
        sent = moved.ici_bytes / links if links else 0.0
        times[path] = max(moved.hbm_bytes / chip.hbm_bytes_per_second, sent) * 1e6
    best = min(times, key=times.__getitem__)
    return best, times[best]


def text(rows: Sequence[CompiledRow]) -> str:
    """The table and what its figures are."""
    cells = [
        [
            row.workload, row.format, f"{row.num_devices} x {row.chip}", str(row.num_tokens), _us(row.fused_us), _us(row.bound_us),
            _us(row.xla_least_us), row.xla_path, "-" if row.ratio is None else f"{row.ratio:.2f}", row.reason[:80],
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join([table(HEADINGS, cells), "", NOTE])


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
