"""Which problems are tuned: what a command line names, as jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS, Chip, slice_sizes
from tpu_serve.kernels.fused_moe_v2.cases import DEVICE_COUNTS, WORKLOADS
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.key import BUCKETS, Key, key_of
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of

CHIPS = tuple(TPU_CHIPS)
"""Those tuned for if none is named."""


@dataclass(frozen=True, slots=True)
class Job:
    """A problem to find a config for: one row of a table."""

    workload: str
    chip: Chip
    problem: Problem

    @property
    def key(self) -> Key:
        key = key_of(self.problem)
        assert key is not None
        assert key.num_tokens == self.problem.num_tokens, "jobs are for whole buckets"
        return key

    @property
    def label(self) -> str:
        p = self.problem
        return f"{self.workload}-{self.chip.name}-{p.format}-D{p.num_devices}-T{p.num_tokens}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Every combination of the named things.

    Attributes:
      formats: None for those that suit a layer on a chip. Where they are named, every layer is asked for in each of them.
      device_counts: None for those of `DEVICE_COUNTS` that the chip has slices of.
      layers: by name, tuned for beside the workloads; in their own format unless `formats` names some.
    """

    chips: tuple[str, ...] = CHIPS
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    formats: tuple[str, ...] | None = None
    device_counts: tuple[int, ...] | None = None
    tokens: tuple[int, ...] = BUCKETS
    layers: tuple[tuple[str, MoELayer], ...] = ()


def known(flag: str, given: Iterable[object] | None, names: Sequence[object]) -> None:
    """Raises: ConfigError, where something is given that is not among the names."""
    for one in given or ():
        if one not in names:
            raise ConfigError(f"{flag} {one} is unknown; known are {', '.join(map(str, names))}.")


def jobs_of(selection: Selection) -> list[Job]:
    """The jobs of a selection, each once, tokens innermost.

    Raises:
      ConfigError: it names something unknown, or a slice that a chip does not have.
    """
    known("--chip", selection.chips, tuple(TPU_CHIPS))
    known("--workload", selection.workloads, tuple(WORKLOADS))
    known("--format", selection.formats, tuple(FORMATS))
    known("--num-tokens", selection.tokens, BUCKETS)
    for chip in selection.chips:
        sizes = slice_sizes(TPU_CHIPS[chip])
        for count in selection.device_counts or ():
            if count not in sizes:
                raise ConfigError(
                    f"--num-devices {count}: {chip} has no slice of {count} devices; there are {', '.join(map(str, sizes))}."
                )
    return list(dict.fromkeys(_all(selection)))


def _all(selection: Selection) -> Iterator[Job]:
    for name in selection.chips:
        chip = TPU_CHIPS[name]
        counts = selection.device_counts or tuple(count for count in DEVICE_COUNTS if count in slice_sizes(chip))
        for layer_name, layer in _layers(selection, name):
            for num_devices in counts:
                for num_tokens in sorted(selection.tokens):
                    yield Job(layer_name, chip, problem_of(layer, num_tokens, num_devices, _POLICY))


_POLICY = Policy(sequence_parallel=True)
"""What rows of a table are about, see `moe_plan.key.Key`."""


def _layers(selection: Selection, chip: str) -> Iterator[tuple[str, MoELayer]]:
    for workload in (WORKLOADS[one] for one in selection.workloads):
        for format in selection.formats or workload.formats(chip):
            yield workload.name, MoELayer.of_workload(workload, format)
    for name, layer in selection.layers:
        for format in selection.formats or (layer.format,):
            dtype = "float32" if format == "float32" else "bfloat16"
            yield name, dataclasses.replace(layer, format=format, dtype=dtype)
