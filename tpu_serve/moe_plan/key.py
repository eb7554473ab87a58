"""A problem of the fused kernel as a row of a tuning table names it, and its config as the row holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_serve.config import ConfigError
from tpu_serve.kernels.fused_moe_v2.config import MODES, Config
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem
from tpu_serve.tuning_tables.typed import Malformed, from_json

KERNEL = "fused_moe_v2"

BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Token counts that rows are for, of the whole group of devices."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a row is about. Names and meanings as in `Problem`; what is not in it changes no tile.

    Sequence parallelism is not: rows are about the layer with it. Without it nothing is dispatched, and the rest of the row holds.

    Attributes:
      num_tokens: one of `BUCKETS`.
      activation: its name.
      gate_up_bias, down_bias, post_norm, scale_on_input: whether there is such.
      dispatch_dtype, combine_dtype: None as in `Problem`.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_devices: int
    format: str
    num_tokens: int
    dtype: str = "bfloat16"
    activation: str = "silu"
    gate_up_bias: bool = False
    down_bias: bool = False
    post_norm: bool = False
    scale_on_input: bool = False
    dispatch_dtype: str | None = None
    combine_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "top_k", "num_devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_tokens not in BUCKETS:
            raise ValueError(f"num_tokens must be one of {', '.join(map(str, BUCKETS))}, got {self.num_tokens}")

    def at(self, num_tokens: int) -> Key:
        return dataclasses.replace(self, num_tokens=num_tokens)

    @property
    def rows_per_expert(self) -> float:
        """Of a token's rows, how many an expert gets on average."""
        return self.num_tokens * self.top_k / self.num_experts


def bucket_of(num_tokens: int) -> int | None:
    """The least bucket that holds so many tokens, None where all are smaller."""
    return next((bucket for bucket in BUCKETS if bucket >= num_tokens), None)


def key_of(problem: Problem) -> Key | None:
    """The key of the row that answers for a problem; None where it has more tokens than any bucket."""
    p, bucket = problem, bucket_of(problem.num_tokens)
    if bucket is None:
        return None
    return Key(
        p.hidden, p.intermediate, p.num_experts, p.top_k, p.num_devices, p.format, bucket, p.dtype, p.activation.name,
        p.gate_up_bias, p.down_bias, p.post_norm is not None, p.scale_on_input, p.dispatch_dtype, p.combine_dtype,
    )  # fmt: skip


def problem_of_key(key: Key) -> Problem:
    """The problem that a row was made for: the layer with sequence parallelism, where the devices are more than one."""
    return Problem(
        num_tokens=key.num_tokens,
        num_experts=key.num_experts,
        top_k=key.top_k,
        hidden=key.hidden,
        intermediate=key.intermediate,
        num_devices=key.num_devices,
        format=key.format,
        dtype=key.dtype,
        activation=Activation(key.activation),
        gate_up_bias=key.gate_up_bias,
        down_bias=key.down_bias,
        post_norm=PostNorm(1e-6) if key.post_norm else None,
        scale_on_input=key.scale_on_input,
        dispatch_dtype=key.dispatch_dtype,
        combine_dtype=key.combine_dtype,
    )


_OF_MODE = {
    "D": ("mode", "tile_columns", "ring_slots", "compact_rows"),
    "G": ("mode", "dispatch", "combine", "tile_columns", "ring_slots", "block_rows", "tile_rows", "rounds", "combine_tokens", "resident"),
}  # fmt: skip
"""Fields of a config that mean something in its mode. A row holds exactly these: no default of the code can change what it says."""


def config_to_json(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _OF_MODE[config.mode]}


def config_from_json(value: Any, where: str) -> Config:
    """Raises: Malformed, where a field is unknown, missing, of another type or of the other mode."""
    mode = value.get("mode") if isinstance(value, dict) else None
    if mode not in MODES:
        raise Malformed(f"{where} must be an object with a mode of {' or '.join(MODES)}")
    if wrong := [name for name in value if name not in _OF_MODE[mode]]:
        raise Malformed(
            f"{where} has the field {wrong[0]!r}, which mode {mode} does not have; it has {', '.join(_OF_MODE[mode])}"
        )
    if missing := [name for name in _OF_MODE[mode] if name not in value]:
        raise Malformed(f"{where} lacks the field {missing[0]!r} of mode {mode}")
    return from_json(Config, value, where)


def read_tiles(given: Mapping[str, Any] | None) -> Config | None:
    """The config that a user gives for experiments, as in a row's value.

    Raises:
      ConfigError: it is none.
    """
    if not given:
        return None
    try:
        return config_from_json(dict(given), "--moe-tiles")
    except Malformed as error:
        raise ConfigError(f"{error}.") from None
