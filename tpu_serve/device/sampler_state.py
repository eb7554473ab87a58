"""What the sampler remembers of each slot's sequence from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import pytree, zeros
from tpu_serve.request import MAX_BIASES

IN_PROMPT = 1 << 15
"""This bit of a count says that the token is in the prompt; the bits below it say how often it was generated."""
MOST_COUNTED = IN_PROMPT - 1
"""Tokens that were generated more often count as often as this."""


@pytree
@dataclass(frozen=True, slots=True)
class SamplerState:
    """One row per slot, written when a sequence that asks for it gets the slot; what other sequences left there is never read.

    Attributes:
      counts: u16[slots, V], for penalties: `IN_PROMPT` and how often each token was generated.
      bias_ids: i32[slots, MAX_BIASES], tokens whose logits are changed, those of one token add up; V and more in unused entries.
      bias_values: f32[slots, MAX_BIASES], what is added to the logit.
      bias_until: i32[slots, MAX_BIASES], output position from which the entry no longer applies.
    """

    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    bias_until: jax.Array

    @classmethod
    def abstract(cls, num_slots: int, vocab_size: int, sharding: jax.sharding.Sharding | None = None) -> SamplerState:
        """Shapes where the arrays go."""

        def shape(width: int, dtype: jax.typing.DTypeLike) -> Any:
            return jax.ShapeDtypeStruct((num_slots, width), dtype, sharding=sharding)

        return cls(
            shape(vocab_size, jnp.uint16),
            shape(MAX_BIASES, jnp.int32),
            shape(MAX_BIASES, jnp.float32),
            shape(MAX_BIASES, jnp.int32),
        )

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, sharding: jax.sharding.Sharding | None = None) -> SamplerState:
        """State in which nothing was written yet."""
        return zeros(cls.abstract(num_slots, vocab_size, sharding))


def num_bytes(num_slots: int, vocab_size: int) -> int:
    """Bytes of a `SamplerState`, which each device holds whole."""
    return num_slots * (2 * vocab_size + 3 * 4 * MAX_BIASES)
