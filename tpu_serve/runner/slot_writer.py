"""Writes what a sequence brings along into its slot of the sampler's state, when it gets the slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tpu_serve.device.mesh import by_rank, data_axis, replicated
from tpu_serve.device.ranks import Ranks
from tpu_serve.device.sampler_state import IN_PROMPT, MOST_COUNTED, SamplerState
from tpu_serve.request import MAX_BIASES, Bias
from tpu_serve.runner.compilation import Program
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import Scheduled

WRITE_COUNTS, WRITE_BIASES = "write counts", "write biases"
"""Names of programs."""


class SlotWriter:
    """Two small programs, compiled once, for any sequence that has penalties or biases.

    Args:
      state: as it will be handed to `write`, or its shapes and shardings.
      mesh: where it lies.
    """

    def __init__(self, state: SamplerState, mesh: Mesh):
        self._ranks = Ranks(mesh)
        self._num_slots, self._vocab_size = state.counts.shape[0] // self._ranks.num, state.counts.shape[1]
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        self._write_counts: Any = None
        self._write_biases: Any = None

    @property
    def programs(self) -> list[Program]:
        """Both, not yet compiled: (state, slot, row) -> state."""
        rows = {WRITE_COUNTS: self._nothing[0], WRITE_BIASES: self._nothing[1]}
        functions = {WRITE_COUNTS: _write_counts, WRITE_BIASES: _write_biases}
        return [Program(name, partial(self._lower, function, rows[name])) for name, function in functions.items()]

    def start(self, state: SamplerState, compiled: Callable[[str], Any]) -> SamplerState:
        """Takes both by their names and runs them once, on no slot."""
        self._write_counts, self._write_biases = compiled(WRITE_COUNTS), compiled(WRITE_BIASES)
        nobody, (counts, biases) = self._slot(-1, self._num_slots), self._nothing
        return self._write_biases(self._write_counts(state, nobody, counts), nobody, biases)

    def compile(self, state: SamplerState) -> SamplerState:
        """Compiles both and runs them once, on no slot."""
        compiled = {program.name: program.lower().compile() for program in self.programs}
        return self.start(state, compiled.__getitem__)

    @property
    def _nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows that say nothing, for each of the two."""
        return np.zeros(self._vocab_size, np.uint16), bias_row((), self._vocab_size)

    def _lower(self, function: Callable[..., SamplerState], row: np.ndarray) -> jax.stages.Lowered:
        nobody, mesh = self._slot(-1, self._num_slots), self._ranks.mesh
        inputs = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in ((nobody, by_rank(mesh)), (row, replicated(mesh)))
        )
        shardings = jax.tree.map(lambda x: x.sharding, self._shapes)
        return jax.jit(self._on_ranks(function), donate_argnums=0, out_shardings=shardings).lower(self._shapes, *inputs)

    def write(self, state: SamplerState, by_rank: Iterable[tuple[Scheduled, ...]]) -> SamplerState:
        """The state with the rows of all sequences that start in this step.

        Args:
          by_rank: the rows of each data rank.
        """
        for rank, scheduled in enumerate(by_rank):
            for item in scheduled:
                if item.is_first:
                    state = self._write(state, item.sequence, rank)
        return state

    def _write(self, state: SamplerState, sequence: Sequence, rank: int) -> SamplerState:
        if sequence.request.params.has_penalties:
            slot = self._slot(rank, sequence.slot)
            state = self._write_counts(state, slot, count_row(sequence, self._vocab_size))
        if sequence.request.biases:
            slot = self._slot(rank, sequence.slot)
            state = self._write_biases(state, slot, bias_row(sequence.request.biases, self._vocab_size))
        return state

    def _slot(self, rank: int, slot: int) -> Any:
        """i32[ranks]: a slot of one data rank, and none of the others; i32[] where there is one rank."""
        if self._ranks.num == 1:
            return np.int32(slot)
        slots = np.full(self._ranks.num, self._num_slots, np.int32)
        slots[rank] = slot
        return slots

    def _on_ranks(self, function: Callable[..., SamplerState]) -> Callable[..., SamplerState]:
        """The function of (state, slot, row) for all ranks, each with a slot of its own."""
        if self._ranks.num == 1:
            return function
        first = PartitionSpec(data_axis(self._ranks.mesh))
        return jax.shard_map(
            lambda state, slots, row: function(state, slots[0], row),
            mesh=self._ranks.mesh,
            in_specs=(first, first, PartitionSpec()),
            out_specs=first,
            check_vma=False,  # the devices of a rank do the same
        )


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
