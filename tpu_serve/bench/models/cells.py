"""Which programs are compiled: models on slices, steps, and how many layers of which kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.models.published import MODELS, Slice, folder
from tpu_serve.bench.models.step import DECODE, PREFILL, Step
from tpu_serve.config import ConfigError
from tpu_serve.hf_config import read_config

STEPS = {
    f"{phase}{tokens}": Step.of(phase, tokens)
    for phase, tokens in ((DECODE, 64), (PREFILL, 2048), (DECODE, 8), (DECODE, 256), (PREFILL, 8192))
}
"""By name; those that say most come first."""

Layers = tuple[str, ...]
"""The kind of each layer, one after the other."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of a model on a slice."""

    model: str
    slice: Slice
    step: Step

    @property
    def label(self) -> str:
        return f"{self.model} {self.slice.name} {self.step.phase} {self.step.num_tokens}"


@dataclass(frozen=True, slots=True)
class Job:
    """One program of a cell: that of its model with so many layers.

    Attributes:
      overrides: laid over config.json beside those that cut layers.
    """

    cell: Cell
    layers: Layers
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        counts = Counter(self.layers)
        kinds = " + ".join(f"{count} {kind.removesuffix('_attention')}" for kind, count in counts.items())
        return f"{self.cell.label}: {kinds}"

    def as_json(self) -> dict[str, Any]:
        """What the worker is asked; equal requests are the same job."""
        cell = self.cell
        return {
            "model": cell.model, "chip": cell.slice.chip, "num_devices": cell.slice.num_devices, "phase": cell.step.phase,
            "num_tokens": cell.step.num_tokens, "layers": list(self.layers), "overrides": dict(self.overrides),
        }  # fmt: skip


def all_layers(model: str) -> Layers:
    """Of a published model. Where all are alike, config.json names no kinds."""
    config = read_config(folder(model))
    return tuple(
        config.get("layer_types", None, kind=list) or ["full_attention"] * config.positive("num_hidden_layers")
    )


def cut(pattern: Layers, counts: dict[str, int]) -> Layers:
    """Layers of each kind, the kinds in the order in which they first come."""
    return tuple(kind for kind in dict.fromkeys(pattern) for _ in range(counts[kind]))


def jobs(cell: Cell, num_layers: int = 1, *, is_whole: bool = False) -> list[Job]:
    """The programs from which a cell is calculated: one with `num_layers` layers of each kind, and for each kind one with a layer more."""
    pattern = all_layers(cell.model)
    if is_whole:
        return [Job(cell, pattern)]
    base = dict.fromkeys(pattern, num_layers)
    return [Job(cell, cut(pattern, base)), *(Job(cell, cut(pattern, base | {kind: base[kind] + 1})) for kind in base)]


def select(models: Sequence[str] | None, steps: Sequence[str] | None, slices: Sequence[str] | None) -> list[Cell]:
    """The cells of all named things, for every step the models one after the other.

    Raises:
      ConfigError: something is unknown, or nothing is left.
    """
    for flag, given, known in (("--models", models, tuple(MODELS)), ("--cells", steps, tuple(STEPS))):
        for name in given or ():
            if name not in known:
                raise ConfigError(f"{flag} {name} is unknown; known are {', '.join(known)}.")
    known_slices = {one.name.replace(" ", ":"): one for some in MODELS.values() for one in some}
    for name in slices or ():
        if name not in known_slices:
            raise ConfigError(f"--slices {name} is unknown; known are {', '.join(known_slices)}.")
    cells = [
        Cell(model, one, STEPS[step])
        for step in steps or STEPS
        for model in models or MODELS
        for one in MODELS[model]
        if not slices or one.name.replace(" ", ":") in slices
    ]
    if not cells:
        raise ConfigError("nothing to do: none of the --models is for one of the --slices.")
    return list(dict.fromkeys(cells))
