"""Which programs are compiled: models on slices, and steps."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of a model on a slice: one program."""

    model: str
    slice: Slice
    step: Step

    @property
    def label(self) -> str:
        return f"{self.model} {self.slice.name} {self.step.phase} {self.step.num_tokens}"

    def as_json(self) -> dict[str, Any]:
        """What the worker is asked; equal requests are the same cell."""
        return {
            "model": self.model, "chip": self.slice.chip, "num_devices": self.slice.num_devices, "phase": self.step.phase,
            "num_tokens": self.step.num_tokens,
        }  # fmt: skip


def all_layers(model: str) -> list[str]:
    """The kind of each layer of a published model, one after the other. Where all are alike, config.json names no kinds."""
    config = read_config(folder(model))
    return config.get("layer_types", None, kind=list) or ["full_attention"] * config.positive("num_hidden_layers")


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
