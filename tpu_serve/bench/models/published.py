"""Models that are compiled, with what their published config.json says of their sizes, and the slices that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu_serve.device.chip import TPU_CHIPS, slice_grid

CONFIGS = Path(__file__).parent / "configs"
"""A folder for each model with a config.json: of the published one what decides about sizes and formats, text model only."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Devices of a kind. Two devices of a tpu7x are one chip."""

    chip: str
    num_devices: int

    @property
    def name(self) -> str:
        grid = slice_grid(TPU_CHIPS[self.chip], self.num_devices)
        return f"{self.chip} {'x'.join(map(str, grid)) if grid else self.num_devices}"


MODELS: Mapping[str, tuple[Slice, ...]] = {
    "Qwen3-30B-A3B": (Slice("v6e", 8), Slice("tpu7x", 8)),
    "Qwen3.5-397B-A17B-FP8": (Slice("tpu7x", 16),),
    "gemma-4-26B-A4B": (Slice("v6e", 8),),
    "gpt-oss-120b": (Slice("v6e", 8),),
    "Qwen3-Coder-480B-A35B-FP8": (Slice("tpu7x", 16),),
}


def folder(model: str) -> Path:
    """Of a model in `MODELS`."""
    return CONFIGS / model
