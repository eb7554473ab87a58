"""`bench kernels --compiled`: which kernels there are, and which cells a command line asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpu_serve.bench.attention_cells import RaggedPagedAttention
from tpu_serve.bench.fused_moe_cells import FusedMoe
from tpu_serve.bench.kernel_cells import Cell, Kernel
from tpu_serve.bench.one_device_cells import GroupedMatmul, MoeCombine
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS

KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel for kernel in (FusedMoe(), MoeCombine(), GroupedMatmul(), RaggedPagedAttention())
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which cells: every combination of the named things that the kernels know.

    Attributes:
      kernels: names in `KERNELS`.
      chips: names in `TPU_CHIPS`.
      workloads, formats, tokens, device_counts: see `Kernel`; None leaves them to each kernel.
      mode: a kernel's mode where it is asked for, else the kernel's choice.
    """

    kernels: tuple[str, ...] = ("fused_moe_v2",)
    chips: tuple[str, ...] = ("v5e", "v6e", "tpu7x")
    workloads: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    device_counts: tuple[int, ...] | None = None
    mode: str | None = None


def check(selection: Selection) -> list[Cell]:
    """The cells of a selection, kernel by kernel and chip by chip, each once.

    Raises:
      ConfigError: it names something unknown, or a kernel has none.
    """
    _known("--kernel", selection.kernels, tuple(KERNELS))
    kernels = [KERNELS[name] for name in dict.fromkeys(selection.kernels)]
    _known("--chip", selection.chips, tuple(TPU_CHIPS))
    _known("--workload", selection.workloads, tuple(name for kernel in kernels for name in kernel.workloads))
    _known("--format", selection.formats, tuple(name for kernel in kernels for name in kernel.formats))
    counts = {count for kernel in kernels for count in kernel.known_device_counts}
    _known("--num-devices", selection.device_counts, tuple(sorted(counts)))
    found: list[Cell] = []
    for kernel in kernels:
        if selection.mode is not None:
            if not kernel.modes:
                raise ConfigError(f"--mode: {kernel.name} has only one.")
            _known("--mode", (selection.mode,), kernel.modes)
        cells = _cells(kernel, selection)
        if not cells:
            raise ConfigError(
                f"nothing to do for {kernel.name}: none of its workloads is run in that --format on that --chip and --num-devices."
            )
        found += cells
    return found


def _cells(kernel: Kernel, selection: Selection) -> list[Cell]:
    def of_kernel(chosen: tuple[str, ...] | None, known: tuple[str, ...]) -> tuple[str, ...]:
        return known if chosen is None else tuple(name for name in chosen if name in known)

    counts = selection.device_counts or kernel.device_counts
    cells = [
        Cell(kernel, case)
        for chip in selection.chips
        for case in kernel.cases(
            chip,
            of_kernel(selection.workloads, kernel.workloads),
            None if selection.formats is None else of_kernel(selection.formats, kernel.formats),
            selection.tokens or kernel.tokens,
            tuple(count for count in counts if count in kernel.known_device_counts),
        )
    ]
    return list({cell.key: cell for cell in cells}.values())


def _known(
    option: str, given: tuple[str, ...] | tuple[int, ...] | None, names: tuple[str, ...] | tuple[int, ...]
) -> None:
    for name in given or ():
        if name not in names:
            raise ConfigError(f"{option} {name} is unknown; known are {', '.join(map(str, dict.fromkeys(names)))}.")
