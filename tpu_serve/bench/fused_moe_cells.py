"""`fused_moe_v2` as a kernel of `bench kernels`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tpu_serve.bench.kernel_cells import Case, Kernel
from tpu_serve.device.chip import MIB, TPU_CHIPS, Chip
from tpu_serve.kernels.fused_moe_v2 import cases
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import smem_bytes, supports, vmem_bytes
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.lookup import Found, Rows, find
from tpu_serve.moe_plan.rows import rows_of


@cache
def _rows(chip: str) -> Rows:
    return rows_of(chip)


def chosen(problem: Problem, chip: Chip, mode: str | None = None) -> Found:
    """The config that a server would run, from the tables of the package, or with a mode the rule's for that.

    Raises:
      ValueError: there is none; the message is the reason.
    """
    return find(problem, chip, _rows(chip.name)) if mode is None else Found(heuristic(problem, chip, mode), "heuristic")


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
            chosen(case.problem, chip, mode)
        except ValueError as error:
            return str(error)
        return None

    def config(self, case: Case, mode: str | None) -> dict[str, Any]:
        found = chosen(case.problem, TPU_CHIPS[case.chip], mode)
        config = found.config
        return {
            **dataclasses.asdict(config),
            "source": found.source,
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
