"""Mixture-of-experts layers of public models as problems: what tables, compile checks and benchmarks are about.

Shapes are from each model's public `config.json`: `hidden_size`, `moe_intermediate_size` (`intermediate_size` for GPT-OSS), `num_experts`
(`num_local_experts` for GPT-OSS), experts per token, the activation, and `swiglu_limit`. GPT-OSS adds biases in all three projections, and
the 1.702 in its sigmoid is part of the model's code rather than of its configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tpu_serve.kernels.fused_moe_v2.problem import Activation, Problem

TOKENS = (16, 64, 256, 1024, 4096, 16384)
"""Of the whole group of devices."""

DEVICE_COUNTS = (4, 8, 16)

FORMATS = {
    "v5e": ("bfloat16", "int8_channel", "w8a16"),
    "v5p": ("bfloat16", "int8_channel", "w8a16"),
    "v6e": ("bfloat16", "int8_channel", "w8a16"),
    "tpu7x": ("bfloat16", "fp8_channel", "fp8_block512", "fp4_block512"),
}
"""Formats worth serving by chip, for models that do not prescribe theirs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One layer of a public model.

    Attributes:
      name: as the model is published.
      hidden, intermediate, num_experts, top_k, activation: as in `Problem`.
      biases: all projections add one.
      is_mxfp4: published in that format, so that no other 4-bit or 8-bit weights of it are of interest where a chip can read it.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: Activation = field(default_factory=Activation)
    biases: bool = False
    is_mxfp4: bool = False

    def formats(self, chip: str) -> tuple[str, ...]:
        """Formats worth serving on a chip, by its name in `TPU_CHIPS`."""
        if self.is_mxfp4:
            return ("mxfp4",) if chip == "tpu7x" else ("int8_channel",)
        return FORMATS[chip]

    def problem(self, num_tokens: int, num_devices: int, format: str) -> Problem:
        """The layer in bfloat16 with sequence parallelism, nothing compressed on its way."""
        return Problem(
            num_tokens=num_tokens,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_devices=num_devices,
            format=format,
            activation=self.activation,
            gate_up_bias=self.biases,
            down_bias=self.biases,
        )


WORKLOADS = {
    one.name: one
    for one in (
        Workload("Qwen3-30B-A3B", 2048, 768, 128, 8),
        Workload("Qwen3-235B-A22B", 4096, 1536, 128, 8),
        Workload("Qwen3-Coder-480B-A35B", 6144, 2560, 160, 8),
        Workload("Qwen3.5-397B-A17B", 4096, 1024, 512, 10),
        Workload("Gemma4-26B-A4B", 2816, 704, 128, 8, Activation("gelu_tanh")),
        Workload("GPT-OSS-120B", 2880, 2880, 128, 4, Activation("swigluoai", 7.0, 1.702), biases=True, is_mxfp4=True),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A problem, and the workload and chip it is about."""

    workload: str
    chip: str
    problem: Problem

    @property
    def label(self) -> str:
        """Short, unique among cases, and fit for a test's name."""
        p = self.problem
        return f"{self.workload}-{self.chip}-{p.format}-T{p.num_tokens}-D{p.num_devices}"


def problems(
    chip: str,
    workloads: Iterable[str] = tuple(WORKLOADS),
    tokens: Iterable[int] = TOKENS,
    device_counts: Iterable[int] = DEVICE_COUNTS,
    formats: Iterable[str] | None = None,
) -> Iterator[Case]:
    """Every combination for a chip, the workloads outermost and the tokens innermost.

    Args:
      chip: name in `TPU_CHIPS`.
      formats: leaves out what is not among them.

    Raises:
      KeyError: an unknown chip or workload.
    """
    if chip not in FORMATS:
        raise KeyError(f"chip {chip!r} is not one of {', '.join(FORMATS)}")
    tokens, device_counts = tuple(tokens), tuple(device_counts)
    wanted = None if formats is None else set(formats)
    for name in workloads:
        workload = WORKLOADS[name]
        for format in workload.formats(chip):
            if wanted is not None and format not in wanted:
                continue
            for num_devices in device_counts:
                for num_tokens in tokens:
                    yield Case(name, chip, workload.problem(num_tokens, num_devices, format))
