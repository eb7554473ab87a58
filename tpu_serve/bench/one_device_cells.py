"""The kernels for one device as kernels of `bench kernels`, each beside what XLA makes of the same."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from tpu_serve.bench.kernel_cells import TENSOR_CORE, XLA, Case, Kernel
from tpu_serve.device.chip import MIB, TPU_CHIPS, Chip
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.grouped_matmul import cases as products
from tpu_serve.kernels.grouped_matmul import config as grouped_matmul
from tpu_serve.kernels.moe_combine import cases as moves
from tpu_serve.kernels.moe_combine import problem as moe_combine


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What a case is about: an operation on the layer of a workload, with so many tokens."""

    operation: str
    workload: str
    num_tokens: int


class OneDevice(Kernel):
    """See `kernel_cells.Kernel`. A case's problem is a `Subject`, in bfloat16, with all tokens and all experts on one device.

    Attributes:
      operations: what the kernel can do.
      program: the target.
    """

    workloads = tuple(WORKLOADS)
    formats = ("bfloat16",)
    tokens = (256, 2048, 16384)
    device_counts = (1,)
    known_device_counts = (1,)
    modes = ()
    columns = ("tiles", "VMEM MiB")
    operations: tuple[str, ...]
    program: str

    def cases(
        self,
        chip: str,
        workloads: tuple[str, ...],
        formats: tuple[str, ...] | None,
        tokens: tuple[int, ...],
        device_counts: tuple[int, ...],
    ) -> Iterator[Case]:
        if not device_counts or formats == ():
            return
        for workload in workloads:
            for operation in self.operations:
                for num_tokens in tokens:
                    for backend in (TENSOR_CORE, XLA):
                        label = f"{operation}-{workload}-{chip}-T{num_tokens}-{backend}"
                        yield Case(label, workload, chip, 1, Subject(operation, workload, num_tokens), backend)

    @abstractmethod
    def reason_against(self, subject: Subject, chip: Chip) -> str | None:
        """Why the kernel cannot, or None."""

    @abstractmethod
    def cut(self, subject: Subject, chip: Chip) -> tuple[Any, int]:
        """The config that is chosen, a dataclass, and the bytes of VMEM that it takes."""

    @abstractmethod
    def tiles(self, config: Mapping[str, Any]) -> str:
        """A config in short."""

    def refusal(self, case: Case, mode: str | None) -> str | None:
        """XLA's program has no limits."""
        return None if case.backend == XLA else self.reason_against(case.problem, TPU_CHIPS[case.chip])

    def config(self, case: Case, mode: str | None) -> dict[str, Any]:
        if case.backend == XLA:
            return {}
        config, vmem = self.cut(case.problem, TPU_CHIPS[case.chip])
        return {**dataclasses.asdict(config), "vmem_bytes": vmem}

    def target(self, case: Case, mode: str | None) -> tuple[str, dict[str, Any]]:
        return self.program, {"chip": case.chip, "backend": case.backend, **dataclasses.asdict(case.problem)}

    def figures(self, case: Case, config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
        return (self.tiles(config), f"{config['vmem_bytes'] / MIB:.0f}") if config else ("", "")


class MoeCombine(OneDevice):
    """Combine, permute, and the products of a token with its rows, which are a gradient."""

    name = "moe_combine"
    operations = moves.OPERATIONS
    program = "tpu_serve.bench.moe_combine:program"

    def _problem(self, subject: Subject, chip: Chip) -> moe_combine.Problem:
        return moves.problem(chip, moves.operation(subject.operation), subject.workload, subject.num_tokens)

    def reason_against(self, subject: Subject, chip: Chip) -> str | None:
        return moe_combine.supported(self._problem(subject, chip), chip, moves.operation(subject.operation))

    def cut(self, subject: Subject, chip: Chip) -> tuple[moe_combine.Config, int]:
        problem, operation = self._problem(subject, chip), moves.operation(subject.operation)
        config = moe_combine.heuristic(problem, chip, operation)
        return config, moe_combine.vmem_bytes(problem, config, operation)

    def tiles(self, config: Mapping[str, Any]) -> str:
        return f"C{config['block_tokens']} P{config['panel']}"


class GroupedMatmul(OneDevice):
    """Both products of a layer's experts, and the gradients of the second one."""

    name = "grouped_matmul"
    operations = products.OPERATIONS
    program = "tpu_serve.bench.grouped_matmul:program"

    def _problem(self, subject: Subject) -> grouped_matmul.Problem:
        return products.problem(subject.operation, subject.workload, subject.num_tokens)

    def reason_against(self, subject: Subject, chip: Chip) -> str | None:
        return grouped_matmul.supported(self._problem(subject), chip)

    def cut(self, subject: Subject, chip: Chip) -> tuple[grouped_matmul.Config, int]:
        problem = self._problem(subject)
        config = grouped_matmul.heuristic(problem, chip)
        return config, grouped_matmul.vmem_bytes(problem, config)

    def tiles(self, config: Mapping[str, Any]) -> str:
        tile_in = f"x{config['tile_in']}" if config["tile_in"] else ""
        return f"M{config['tile_rows']} N{config['tile_columns']}{tile_in} x{config['ring_slots']}"
