"""Rotary position embedding, plain and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate-half embedding over the beginning of a head, or all of it.

    Attributes:
      inverse_frequencies: per pair of dimensions. As many pairs are rotated; what lies behind them stays as it is.
      magnitude: factor on cosine and sine.
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0

    @classmethod
    def from_config(cls, config: HFConfig, head_dim: int, default_theta: float) -> Rope:
        """Reads `rope_theta`, `rope_scaling` and `partial_rotary_factor` of config.json.

        Raises:
          ConfigError: as `from_parameters`.
        """
        if config.get("rope_parameters", None) is not None:
            raise ConfigError(
                f"{config.file}: rope_parameters holds one entry per kind of layer, but all layers of {config.get('model_type')} share "
                f"one rotary embedding: give its keys without the kinds."
            )
        scaling = config.get("rope_scaling", None, kind=dict) or {}
        given = {name: config.get(name, None, kind=float) for name in ("rope_theta", "partial_rotary_factor")}
        return cls.from_parameters({**scaling, **given}, head_dim, default_theta)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], head_dim: int, default_theta: float) -> Rope:
        """From an entry of transformers' `rope_parameters`.

        Its `rope_type` is "default", "linear" (frequencies divided by `factor`), "yarn", or "proportional": pairs are as far apart as in a
        head that is rotated whole, but only the first share of them turns (Gemma 4).

        Raises:
          ConfigError: the type is not supported or lacks a number, or so many dimensions cannot be rotated in pairs.
        """
        kind = parameters.get("rope_type") or "default"
        theta = _number(parameters, "rope_theta", default_theta)
        share = _number(parameters, "partial_rotary_factor", 1.0)
        if theta <= 0 or not 0 < share <= 1:
            raise ConfigError(
                f"config.json: rope_theta must be positive and partial_rotary_factor in (0, 1], got {theta:g} and {share:g}."
            )
        rotated = int(head_dim * share)
        if rotated % 2 or rotated < 2:
            raise ConfigError(f"config.json: {rotated} dimensions of a head of {head_dim} cannot be rotated in pairs.")
        if kind == "proportional":
            turning = theta ** -(np.arange(0, rotated, 2) / head_dim) / _number(parameters, "factor", 1.0)
            return cls((*turning.tolist(), *[0.0] * ((head_dim - rotated) // 2)))
        plain = theta ** -(np.arange(0, rotated, 2) / rotated)
        match kind:
            case "default":
                return cls(tuple(plain.tolist()))
            case "linear":
                return cls(tuple((plain / _required(parameters, kind, "factor")).tolist()))
            case "yarn":
                return cls._yarn(rotated, theta, plain, parameters)
        raise ConfigError(
            f"config.json: rope type {kind!r} is not supported; supported are 'default', 'linear', 'yarn' and 'proportional'."
        )

    @classmethod
    def _yarn(cls, head_dim: int, theta: float, plain: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
        """YaRN (https://arxiv.org/abs/2309.00071), sections 3.2 and 3.4: slow dimensions are interpolated, fast ones are left alone."""
        factor = _required(scaling, "yarn", "factor")
        original = _required(scaling, "yarn", "original_max_position_embeddings")

        def dimension_of(rotations: float) -> float:
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        if theta == 1:
            raise ConfigError("config.json: yarn needs a rope_theta other than 1.")
        fast, slow = (_number(scaling, name, default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
        truncate = scaling.get("truncate", True)
        if fast <= 0 or slow <= 0 or not isinstance(truncate, bool):
            raise ConfigError(
                f"config.json: yarn needs positive numbers beta_fast and beta_slow, and true or false for truncate, got {fast:g}, {slow:g} "
                f"and {truncate!r}."
            )
        low, high = dimension_of(fast), dimension_of(slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        magnitude = _number(scaling, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        return cls(tuple((plain / factor * ramp + plain * (1 - ramp)).tolist()), float(magnitude))

    def cos_sin(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine, f32[T, pairs] each, for i32[T] positions. The same for all layers with this embedding."""
        angles = positions[:, None].astype(jnp.float32) * jnp.asarray(self.inverse_frequencies, jnp.float32)
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `[T, heads, head_dim]`. With P pairs, dimension i is paired with i + P; dimensions from 2 P on stay as they are."""
    cos, sin = (part[:, None, :] for part in cos_sin)
    num_pairs = cos.shape[-1]
    first, second = (x[..., at : at + num_pairs].astype(jnp.float32) for at in (0, num_pairs))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * num_pairs :]], axis=-1)


def _number(parameters: Mapping[str, Any], name: str, default: float) -> float:
    value = parameters.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"config.json: {name} of the rotary embedding must be a number, got {value!r}.")
    return float(value)


def _required(parameters: Mapping[str, Any], kind: str, name: str) -> float:
    if (value := _number(parameters, name, 0.0)) <= 0:
        raise ConfigError(f"config.json: {kind} needs a positive number {name}, got {parameters.get(name)!r}.")
    return value
