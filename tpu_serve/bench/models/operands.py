"""What kernels read that decides about their way: the scalar operands of a step, as `bench.compiled.program.Program.scalars` has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpu_serve.bench.models.step import DECODE, Step
from tpu_serve.kernels.ragged_paged_attention.problem import TABLE_CHUNK, round_up
from tpu_serve.runner.pack import PackLayout


def attention_scalars(step: Step, layout: PackLayout, num_pages: int) -> dict[str, dict[int, Any]]:
    """Of `ragged_paged_attention`, in the order of its `Operands`: every sequence has pages of its own, side by side.

    Args:
      num_pages: that a cache holds, page 0 being for padding. Sequences share some where they are too few.
    """
    rows, size = layout.num_rows, layout.page_size
    decoding, sequences = step.phase == DECODE, min(step.num_sequences, rows)
    starts = np.full(rows + 1, step.num_tokens)
    starts[: sequences + 1] = np.arange(sequences + 1) * (step.num_tokens // sequences)
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
    return {"ragged_paged_attention": {place: np.asarray(array, np.int32) for place, array in enumerate(operands)}}
