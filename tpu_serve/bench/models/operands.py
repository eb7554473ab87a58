"""What kernels read that decides about their way: the scalar operands of a step, as `bench.compiled.program.Program.scalars` has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_serve.bench.models.step import DECODE, Step
from tpu_serve.kernels.gated_delta_rule import tables
from tpu_serve.kernels.gated_delta_rule.problem import Problem, heuristic
from tpu_serve.kernels.ragged_paged_attention.problem import TABLE_CHUNK, round_up
from tpu_serve.runner.pack import PackLayout


def attention_scalars(step: Step, layout: PackLayout, num_pages: int) -> dict[str, dict[int, Any]]:
    """Of `ragged_paged_attention`, in the order of its `Operands`: every sequence has pages of its own, side by side.

    Args:
      num_pages: that a cache holds, page 0 being for padding. Sequences share some where they are too few.
    """
    rows, size = layout.num_rows, layout.page_size
    decoding, sequences = step.phase == DECODE, min(step.num_sequences, rows)
    starts = _starts(step, rows)
    lengths = np.zeros(rows, np.int32)
    lengths[:sequences] = step.context
    held = -(-step.context // size)
    table = np.zeros((rows, round_up(layout.max_pages, TABLE_CHUNK)), np.int32)
    table[:sequences, :held] = 1 + np.arange(sequences * held).reshape(sequences, held) % (num_pages - 1)
    # A token's place in the cache is behind those that it follows.
    row = np.arange(step.num_tokens) if decoding else np.zeros(step.num_tokens, np.int32)
    position = np.full(step.num_tokens, step.context - 1) if decoding else np.arange(step.num_tokens)
    index = table[row, position // size] * size + position % size
    counts = [step.num_tokens if decoding else 0, step.num_tokens]
    operands = starts, lengths, index, np.array(counts), table.reshape(-1, 1, TABLE_CHUNK)
    return {"ragged_paged_attention": _numbered(operands)}


def recurrence_scalars(step: Step, problem: Problem) -> dict[str, dict[int, Any]]:
    """Of `gated_delta_rule`: every sequence has a row of state of its own, and none keeps a snapshot. The size of the grid comes first."""
    rows = np.arange(problem.num_rows)
    none = np.full(problem.num_rows, problem.num_rows)
    starts = jnp.asarray(_starts(step, problem.num_rows), jnp.int32)
    made = tables.make(problem, heuristic(problem), starts, jnp.asarray(none, jnp.int32), problem.num_rows)
    return {"gated_delta_rule": _numbered((made.counts[1] + 1, *made, rows, rows, none))}


def _starts(step: Step, num_rows: int) -> np.ndarray:
    """[num_rows + 1], where each row's tokens start."""
    sequences = min(step.num_sequences, num_rows)
    starts = np.full(num_rows + 1, step.num_tokens)
    starts[: sequences + 1] = np.arange(sequences + 1) * (step.num_tokens // sequences)
    return starts


def _numbered(operands: Iterable[Any]) -> dict[int, Any]:
    return {place: np.asarray(array, np.int32) for place, array in enumerate(operands)}
