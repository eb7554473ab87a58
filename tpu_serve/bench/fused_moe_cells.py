"""`fused_moe_v2` as a kernel of `bench kernels`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tpu_serve.bench.kernel_cells import Case, Kernel
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2 import cases
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import smem_bytes, supports, vmem_bytes


class FusedMoe(Kernel):
    """See `kernel_cells.Kernel`. A case's problem is a `fused_moe_v2.problem.Problem`; the bound is `fused_moe_v2.bound`'s."""

    name = "fused_moe_v2"
    workloads = tuple(cases.WORKLOADS)
    formats = tuple(FORMATS)
    tokens = cases.TOKENS
    device_counts = cases.DEVICE_COUNTS
    known_device_counts = tuple(sorted({1, 2, *cases.DEVICE_COUNTS}))
    modes = ("D", "G")
    columns = ("mode", "tiles", "VMEM MiB")

    def cases(
        self,
        chip: str,
        workloads: tuple[str, ...],
        formats: tuple[str, ...] | None,
        tokens: tuple[int, ...],
        device_counts: tuple[int, ...],
    ) -> Iterator[Case]:
        for case in cases.problems(chip, workloads, tokens, device_counts, formats):
            yield Case(case.label, case.workload, case.chip, case.problem.num_devices, case.problem)

    def refusal(self, case: Case, mode: str | None) -> str | None:
        """What `supports` says, or that no config is legal."""
        chip = TPU_CHIPS[case.chip]
        reason = supports(case.problem, chip)
        if reason is not None:
            return reason
        try:
            heuristic(case.problem, chip, mode)
        except ValueError as error:
            return str(error)
        return None

    def config(self, case: Case, mode: str | None) -> dict[str, Any]:
        config = heuristic(case.problem, TPU_CHIPS[case.chip], mode)
        return {
            **dataclasses.asdict(config),
            "vmem_bytes": vmem_bytes(case.problem, config),
            "smem_bytes": smem_bytes(case.problem, config),
        }

    def target(self, case: Case, mode: str | None) -> tuple[str, dict[str, Any]]:
        p = case.problem
        arguments = {"chip": case.chip, "workload": case.workload, "num_tokens": p.num_tokens, "format": p.format}
        if mode is not None:
            arguments["config"] = {"mode": mode}
        return "tpu_serve.bench.fused_moe:program", arguments

    def figures(self, case: Case, config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
        tiles, mode = f"F{config['tile_columns']} x{config['ring_slots']}", str(config["mode"])
        if mode == "G":
            tiles += f" M{config['block_rows']}/{config['tile_rows']}"
            mode += f" {config['dispatch']} {config['combine']}"
        return mode, tiles, f"{config['vmem_bytes'] / MIB:.0f}"
