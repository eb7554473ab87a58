"""`moe_combine` as a kernel of `bench kernels`: combine, permute and the gradient of the weights, beside what XLA makes of the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tpu_serve.bench.kernel_cells import TENSOR_CORE, XLA, Case, Kernel
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.moe_combine import cases
from tpu_serve.kernels.moe_combine.problem import heuristic, supported, vmem_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What a case is about: an operation on a workload with so many tokens."""

    operation: cases.Operation
    workload: str
    num_tokens: int


class MoeCombine(Kernel):
    """See `kernel_cells.Kernel`. A case's problem is a `Subject`."""

    name = "moe_combine"
    workloads = tuple(WORKLOADS)
    formats = ("bfloat16",)
    tokens = (256, 2048, 16384)
    device_counts = (1,)
    known_device_counts = (1,)
    modes = ()
    columns = ("tiles", "VMEM MiB")

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
            for operation in cases.OPERATIONS:
                for num_tokens in tokens:
                    for backend in (TENSOR_CORE, XLA):
                        label = f"{operation}-{workload}-{chip}-T{num_tokens}-{backend}"
                        yield Case(label, workload, chip, 1, Subject(operation, workload, num_tokens), backend)

    def refusal(self, case: Case, mode: str | None) -> str | None:
        """What `supported` says of the kernel; XLA's program has no limits."""
        if case.backend == XLA:
            return None
        subject, chip = case.problem, TPU_CHIPS[case.chip]
        return supported(cases.problem(chip, *dataclasses.astuple(subject)), chip, subject.operation)

    def config(self, case: Case, mode: str | None) -> dict[str, Any]:
        if case.backend == XLA:
            return {}
        subject, chip = case.problem, TPU_CHIPS[case.chip]
        problem = cases.problem(chip, *dataclasses.astuple(subject))
        config = heuristic(problem, chip, subject.operation)
        return {**dataclasses.asdict(config), "vmem_bytes": vmem_bytes(problem, config, subject.operation)}

    def target(self, case: Case, mode: str | None) -> tuple[str, dict[str, Any]]:
        arguments = {"chip": case.chip, "backend": case.backend, **dataclasses.asdict(case.problem)}
        return "tpu_serve.bench.moe_combine:program", arguments

    def figures(self, case: Case, config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
        if not config:
            return "", ""
        return f"C{config['block_tokens']} P{config['panel']}", f"{config['vmem_bytes'] / MIB:.0f}"
