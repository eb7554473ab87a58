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
    """Rotate-half embedding over the whole head.

    Attributes:
      inverse_frequencies: per pair of dimensions, head_dim / 2 values.
      magnitude: factor on cosine and sine.
    """

    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0

    @classmethod
    def from_config(cls, config: HFConfig, head_dim: int, default_theta: float) -> Rope:
        """Reads `rope_theta` and `rope_scaling` of config.json.

        Raises:
          ConfigError: the scaling type is not supported or lacks a number, only part of a head is to be rotated, or the head size is odd.
        """
        theta, scaling = config.get("rope_theta", default_theta), config.get("rope_scaling", None, kind=dict)
        if config.get("partial_rotary_factor", 1.0) != 1:
            raise ConfigError("config.json: a partial_rotary_factor other than 1 is not supported for this model.")
        if head_dim % 2 or head_dim < 2:
            raise ConfigError(f"config.json: a head size of {head_dim} cannot be rotated in pairs.")
        plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if scaling is None:
            return cls(tuple(plain.tolist()))
        if (kind := scaling.get("rope_type")) != "yarn":
            raise ConfigError(
                f"config.json: rope_scaling type {kind!r} is not supported; supported are 'default' and 'yarn'."
            )
        return cls._yarn(head_dim, theta, plain, scaling)

    @classmethod
    def _yarn(cls, head_dim: int, theta: float, plain: np.ndarray, scaling: Mapping[str, Any]) -> Rope:
        """YaRN (https://arxiv.org/abs/2309.00071), sections 3.2 and 3.4: slow dimensions are interpolated, fast ones are left alone."""
        for name in ("factor", "original_max_position_embeddings"):
            if not isinstance(scaling.get(name), int | float):
                raise ConfigError(
                    f"config.json: yarn needs a number {name} in rope_scaling, got {scaling.get(name)!r}."
                )
        factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])

        def dimension_of(rotations: float) -> float:
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension_of(scaling.get("beta_fast") or 32.0), dimension_of(scaling.get("beta_slow") or 1.0)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
        magnitude = scaling.get("attention_factor")
        if magnitude is None:
            magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return cls(tuple((plain / factor * ramp + plain * (1 - ramp)).tolist()), float(magnitude))

    def cos_sin(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine, f32[T, head_dim / 2] each, for i32[T] positions. The same for every layer."""
        angles = positions[:, None].astype(jnp.float32) * jnp.asarray(self.inverse_frequencies, jnp.float32)
        return jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `[T, heads, head_dim]`; dimension i is paired with i + head_dim / 2."""
    cos, sin = (part[:, None, :] for part in cos_sin)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
