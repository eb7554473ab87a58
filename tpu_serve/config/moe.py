"""How experts are computed."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_serve.config.folders import user_cache
from tpu_serve.option import ConfigError, check_choices, check_types, option

MOVERS = ("auto", "tc", "onehot", "xla")
"""What may move rows to experts and back: a kernel, a product with a matrix of zeros and ones, or XLA's gathers."""


@dataclass(frozen=True)
class MoEOptions:
    """How experts are computed."""

    moe_backend: str = option(
        "auto",
        "which mixture-of-experts implementation runs; 'fused' is the expert-parallel TPU kernel, 'grouped' is made of kernels for one device; both "
        "are simulated (slowly) on a CPU; 'gathered' is for a CPU and few tokens",
        choices=("auto", "dense", "ragged", "grouped", "gathered", "fused"),
    )
    moe_permute: str = option(
        "auto",
        "what sorts tokens by expert for --moe-backend grouped: 'tc' is a TPU kernel, simulated on a CPU, 'onehot' a matrix product, 'xla' a gather",
        choices=MOVERS,
    )
    moe_combine: str = option(
        "auto", "what adds up a token's experts for --moe-backend grouped; choices as for --moe-permute", choices=MOVERS
    )
    moe_grouped_matmul: str = option(
        "auto",
        "what multiplies by the experts' matrices for --moe-backend grouped: 'tc' is a TPU kernel, simulated on a CPU, 'xla' is XLA's ragged_dot",
        choices=("auto", "tc", "xla"),
    )

    moe_tuning_dir: tuple[str, ...] = option(
        (),
        "folders of tuning tables (<chip>/fused_moe_v2.json, as `tpu-serve tune` writes them) that go before those of the package",
        metavar="DIR",
    )
    moe_strict_tables: bool = option(
        False, "refuse to start while a token bucket of the fused kernel has no row of its own in the tuning tables"
    )
    moe_tiles: dict[str, Any] = option(
        {},
        'for experiments: run the fused kernel with this config (a row\'s "value") wherever it is legal; also read from TPU_SERVE_MOE_TILES',
        metavar="JSON",
    )
    warm_up_measure: bool = option(
        False,
        "on several TPU devices: time the fused kernel and XLA at every token bucket once, take the faster one, and keep the times for later starts on "
        "this host, in the first --moe-tuning-dir or without one in ~/.cache/tpu-serve/tuning_tables",
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        for name in ("moe_permute", "moe_combine", "moe_grouped_matmul"):
            value = getattr(self, name)
            if value != "auto" and self.moe_backend != "grouped":
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} needs --moe-backend grouped: {self.moe_backend} has no such part to choose."
                )
        if self.warm_up_measure:
            if self.moe_backend != "auto":
                raise ConfigError(
                    f"--warm-up-measure needs --moe-backend auto: {self.moe_backend} runs at every token count, and there is nothing to compare."
                )
            if self.tiles:
                raise ConfigError(
                    "--warm-up-measure keeps what it finds, and --moe-tiles is for experiments: use one of them."
                )

    @property
    def non_default(self) -> tuple[str, ...]:
        """Options that ask for something; folders of tables only offer it."""
        names = (item.name for item in dataclasses.fields(self) if item.name != "moe_tuning_dir")
        return tuple(name for name in names if getattr(self, name) != getattr(MoEOptions(), name))

    @property
    def tiles(self) -> dict[str, Any]:
        """What --moe-tiles gives, or the environment where that is left out; empty for neither.

        Raises:
          ConfigError: the environment variable holds no JSON object.
        """
        given = os.environ.get("TPU_SERVE_MOE_TILES")
        if self.moe_tiles or not given:
            return self.moe_tiles
        try:
            value = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"TPU_SERVE_MOE_TILES={given!r} is not JSON: {error}.") from None
        if not isinstance(value, dict):
            raise ConfigError(f"TPU_SERVE_MOE_TILES={given!r} is not a JSON object.")
        return value

    @property
    def measured_folder(self) -> Path:
        """Where --warm-up-measure keeps tables that no folder was named for. Every start reads it, if it is there.

        Raises:
          ConfigError: the user has no home.
        """
        try:
            return user_cache() / "tuning_tables"
        except RuntimeError as error:
            raise ConfigError(f"--moe-tuning-dir must name a folder for --warm-up-measure: {error}") from None

    @property
    def tuning_folders(self) -> list[Path]:
        """Folders of tables that go before those of the package, the first one first."""
        try:
            named = [Path(folder).expanduser() for folder in self.moe_tuning_dir]
        except RuntimeError as error:  # ~nobody
            raise ConfigError(f"--moe-tuning-dir: {error}") from None
        try:
            kept = [self.measured_folder]
        except ConfigError:  # nothing was kept there
            kept = []
        return [*named, *(folder for folder in kept if os.path.isdir(folder))]
