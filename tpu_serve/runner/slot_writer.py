"""Writes what a sequence brings along into its slot of the sampler's state, when it gets the slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpu_serve.device.sampler_state import IN_PROMPT, MOST_COUNTED, SamplerState
from tpu_serve.request import MAX_BIASES, Bias
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import Scheduled


class SlotWriter:
    """Two small programs, compiled once, for any sequence that has penalties or biases.

    Args:
      state: as it will be handed to `write`.
    """

    def __init__(self, state: SamplerState):
        self._num_slots, self._vocab_size = state.counts.shape
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        self._write_counts: Any = None
        self._write_biases: Any = None

    def compile(self, state: SamplerState) -> SamplerState:
        """Compiles both and runs them once, on no slot."""
        nobody, sharding = np.int32(self._num_slots), self._shapes.counts.sharding

        def build(function: Callable[..., SamplerState], row: np.ndarray) -> Any:
            inputs = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in (nobody, row))
            shardings = jax.tree.map(lambda x: x.sharding, self._shapes)
            return jax.jit(function, donate_argnums=0, out_shardings=shardings).lower(self._shapes, *inputs).compile()

        counts, biases = np.zeros(self._vocab_size, np.uint16), bias_row((), self._vocab_size)
        self._write_counts, self._write_biases = build(_write_counts, counts), build(_write_biases, biases)
        return self._write_biases(self._write_counts(state, nobody, counts), nobody, biases)

    def write(self, state: SamplerState, scheduled: tuple[Scheduled, ...]) -> SamplerState:
        """The state with the rows of all sequences that start in this step."""
        for item in scheduled:
            if item.is_first:
                sequence, slot = item.sequence, np.int32(item.sequence.slot)
                if sequence.request.params.has_penalties:
                    state = self._write_counts(state, slot, count_row(sequence, self._vocab_size))
                if sequence.request.biases:
                    state = self._write_biases(state, slot, bias_row(sequence.request.biases, self._vocab_size))
        return state


def count_row(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """u16[V]: which tokens are in the prompt and how often each one was generated, as `SamplerState.counts` holds it.

    Args:
      sequence: all its tokens are known.
    """
    generated = np.bincount(np.asarray(sequence.tokens[sequence.num_prompt :], np.int32), minlength=vocab_size)
    row = np.minimum(generated, MOST_COUNTED).astype(np.uint16)
    row[np.asarray(sequence.tokens[: sequence.num_prompt], np.int32)] |= IN_PROMPT
    return row


def bias_row(biases: tuple[Bias, ...], vocab_size: int) -> np.ndarray:
    """i32[3, MAX_BIASES]: ids, bits of the values, and until when, as `SamplerState` holds them."""
    row = np.zeros((3, MAX_BIASES), np.int32)
    row[0].fill(vocab_size)
    for index, bias in enumerate(biases):
        row[0, index], row[2, index] = bias.token_id, bias.until
        row[1].view(np.float32)[index] = bias.value
    return row


def _write_counts(state: SamplerState, slot: jax.Array, row: jax.Array) -> SamplerState:
    return dataclasses.replace(state, counts=state.counts.at[slot].set(row, mode="drop"))


def _write_biases(state: SamplerState, slot: jax.Array, row: jax.Array) -> SamplerState:
    return dataclasses.replace(
        state,
        bias_ids=state.bias_ids.at[slot].set(row[0], mode="drop"),
        bias_values=state.bias_values.at[slot].set(
            jax.lax.bitcast_convert_type(row[1], state.bias_values.dtype), mode="drop"
        ),
        bias_until=state.bias_until.at[slot].set(row[2], mode="drop"),
    )
