"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """`weight * x / rms(x)` over the last axis: statistics in float32, then the input's type, then the weight (Qwen, Mixtral)."""
    return weight * _normed(x, epsilon).astype(x.dtype)


def rms_norm_wide(x: jax.Array, weight: jax.Array | None, epsilon: float, offset: float = 0.0) -> jax.Array:
    """The same with the weight in float32 too, and only then the input's type (Gemma, GPT-OSS, Qwen3-Next).

    Args:
      weight: None multiplies by nothing.
      offset: added to the weight; 1 where checkpoints store what is missing from 1.
    """
    wide = _normed(x, epsilon)
    return (wide if weight is None else wide * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def _normed(x: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
