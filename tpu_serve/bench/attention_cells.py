"""The attention kernel as a kernel of `bench kernels`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tpu_serve.bench import ragged_paged_attention
from tpu_serve.bench.kernel_cells import Case, Kernel
from tpu_serve.bench.models.step import DECODE, PREFILL, Step
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.ragged_paged_attention.cases import LAYERS
from tpu_serve.kernels.ragged_paged_attention.config import heuristic, supports, vmem_bytes
from tpu_serve.kernels.ragged_paged_attention.problem import Problem

MOST_DECODES = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What a case is about: so many tokens of a layer of a workload on one of `num_devices` devices, decodes or a prompt.

    Attributes:
      stored: see `Problem`.
    """

    workload: str
    num_devices: int
    num_tokens: int
    stored: str | None

    @property
    def phase(self) -> str:
        return DECODE if self.num_tokens <= MOST_DECODES else PREFILL

    @property
    def problem(self) -> Problem:
        step = Step.of(self.phase, self.num_tokens)
        return ragged_paged_attention.problem(self.workload, self.num_devices, step, self.stored)


class RaggedPagedAttention(Kernel):
    """See `kernel_cells.Kernel`. Up to 256 tokens are decodes that see 2048 tokens each, more are one prompt. Formats are those of the cache, and
    --num-devices says among how many the heads are shared out; one of them is compiled."""

    name = "ragged_paged_attention"
    workloads = tuple(LAYERS)
    formats = ("bfloat16", "int8", "float8_e4m3fn")
    tokens = (64, 2048)
    device_counts = (1, 4)
    known_device_counts = (1, 2, 4, 8)
    modes = ()
    columns = ("blocks", "VMEM MiB")

    def cases(
        self,
        chip: str,
        workloads: tuple[str, ...],
        formats: tuple[str, ...] | None,
        tokens: tuple[int, ...],
        device_counts: tuple[int, ...],
    ) -> Iterator[Case]:
        for workload in workloads:
            for cached in ("bfloat16",) if formats is None else formats:
                for num_devices in device_counts:
                    for num_tokens in tokens:
                        subject = Subject(workload, num_devices, num_tokens, None if cached == "bfloat16" else cached)
                        label = f"{subject.phase}-{workload}-of{num_devices}-{cached}-{chip}-T{num_tokens}-tc"
                        yield Case(label, workload, chip, 1, subject)

    def refusal(self, case: Case, mode: str | None) -> str | None:
        return supports(case.problem.problem, TPU_CHIPS[case.chip])

    def config(self, case: Case, mode: str | None) -> dict[str, Any]:
        problem = case.problem.problem
        config = heuristic(problem, TPU_CHIPS[case.chip])
        return {**dataclasses.asdict(config), "vmem_bytes": vmem_bytes(problem, config)}

    def target(self, case: Case, mode: str | None) -> tuple[str, dict[str, Any]]:
        asked = {"chip": case.chip, "phase": case.problem.phase, **dataclasses.asdict(case.problem)}
        return "tpu_serve.bench.ragged_paged_attention:program", asked

    def figures(self, case: Case, config: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
        if case.problem.phase == DECODE:
            cut = f"{config['decode_pieces']} x {config['decode_pages']} pages x{config['decode_ring']}"
        else:
            cut = f"{config['query_tile']} tokens, {config['prefill_pages']} pages x{config['prefill_ring']}"
        return cut, f"{config['vmem_bytes'] / MIB:.0f}"
