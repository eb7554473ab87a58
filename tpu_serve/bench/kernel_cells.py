"""What `bench kernels` compiles: kernels, each with its cases. A kernel is added to `kernels.py` as an object of the form below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

TENSOR_CORE, XLA = "tc", "xla"
"""Backends of a case: the kernel itself, and the program of XLA's own operations that it replaces."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program to compile.

    Attributes:
      label: short and unique among a kernel's cases. Where a problem is compiled for several backends it ends in "-BACKEND", and what
        stands before is the same for all of them.
      workload: the model whose layer it is.
      chip: name in `TPU_CHIPS`.
      num_devices: see `compiled.topology`.
      problem: a dataclass.
      backend: "tc" or "xla".
    """

    label: str
    workload: str
    chip: str
    num_devices: int
    problem: Any
    backend: str = TENSOR_CORE

    @property
    def subject(self) -> str:
        """The label without the backend."""
        return self.label.removesuffix(f"-{self.backend}")


class Kernel(Protocol):
    """A kernel, and what can be asked about it without compiling.

    Attributes:
      name: as in `--kernel`.
      workloads, formats: all that are known; cases are of all workloads if not chosen, and of the formats that suit the chip.
      tokens, device_counts: those taken if not chosen.
      known_device_counts: all that may be chosen.
      modes: ways of the kernel that may be chosen by `--mode`; empty where there is no choice.
      columns: names of the kernel's own columns.
    """

    name: str
    workloads: tuple[str, ...]
    formats: tuple[str, ...]
    tokens: tuple[int, ...]
    device_counts: tuple[int, ...]
    known_device_counts: tuple[int, ...]
    modes: tuple[str, ...]
    columns: tuple[str, ...]

    def cases(
        self,
        chip: str,
        workloads: tuple[str, ...],
        formats: tuple[str, ...] | None,
        tokens: tuple[int, ...],
        device_counts: tuple[int, ...],
    ) -> Iterable[Case]:
        """Every combination on a chip that makes sense, the backends of a problem one after the other; formats None for those that
        suit the chip. What is named is known."""

    def refusal(self, case: Case, mode: str | None) -> str | None:
        """Why the case is not to be compiled, or None."""

    def config(self, case: Case, mode: str | None) -> dict[str, Any]:
        """What is chosen for a case that is not refused (tiles, modes, memory), as JSON; empty where there is nothing to choose."""

    def target(self, case: Case, mode: str | None) -> tuple[str, dict[str, Any]]:
        """The `target` and `kwargs` of `compiled.report.report`. The program's `analytic` says what the bound is calculated from."""

    def figures(self, case: Case, config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
        """Texts for the kernel's own `columns`.

        Args:
          config: what `config` gave.
          found: the report.
        """


@dataclass(frozen=True, slots=True)
class Cell:
    """A case of a kernel. Cells are the same when their `key`s are."""

    kernel: Kernel
    case: Case

    @property
    def key(self) -> tuple[str, str]:
        return self.kernel.name, self.case.label
