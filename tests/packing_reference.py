"""What a packed step must hold: written down row by row and token by token, from the sequences as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_serve.runner.pack import PackLayout
from tpu_serve.scheduler.step import Scheduled

LARGEST = 1e20


def packed_by_definition(scheduled: Sequence[Scheduled], layout: PackLayout) -> dict[str, Any]:
    """Nested lists by the names of the fields of `Batch` and `SamplingRows`."""
    tokens, rows, size = range(layout.num_tokens), range(layout.num_rows), layout.page_size
    padding: dict[str, Any] = {
        **{name: [0] * layout.num_tokens for name in ("token_ids", "positions")},
        **{name: [-1] * layout.num_tokens for name in ("from_slot", "seq_of_token", "prompt_targets")},
        "kv_index": [[token % size for token in tokens] for _ in range(layout.num_tables)],
        "page_table": [[[0] * layout.max_pages for _ in rows] for _ in range(layout.num_tables)],
        **{name: [0] * layout.num_rows for name in ("kv_lens", "sample_at")},
        "slots": [layout.num_slots] * layout.num_rows,
        **{name: [] for name in ("state_read", "state_write", "snapshot_write")},
        **{name: [0] * layout.num_rows for name in ("temperature", "min_p", "top_k", "seed_low", "seed_high", "choice")},
        **{name: [0] * layout.num_rows for name in ("presence_penalty", "frequency_penalty", "is_biased", "output_position")},
        **{name: [1.0] * layout.num_rows for name in ("top_p", "repetition_penalty")},
        "forced_id": [-1] * layout.num_rows,
        **{f"any_{name}": 0 for name in ("random", "filter", "logprobs", "biases", "masks", "penalties", "prompt_logprobs")},
    }  # fmt: skip
    if layout.num_snapshots is not None:
        nobody = layout.num_slots + layout.num_snapshots
        for name in ("state_read", "state_write", "snapshot_write"):
            padding[name] = [nobody] * layout.num_rows
    fields, ends = padding, [0]
    for row, item in enumerate(scheduled):
        _add_tokens(fields, row, ends[-1], item, layout)
        ends.append(ends[-1] + item.length)
        if layout.num_snapshots is not None:
            before = item.sequence.slot if item.start else -1
            fields["state_read"][row] = layout.num_slots + item.restore if item.restore >= 0 else before
            fields["state_write"][row] = item.sequence.slot
            if item.snapshot >= 0:
                fields["snapshot_write"][row] = layout.num_slots + item.snapshot
        if item.samples:
            _add_sampling(fields, row, item)
    fields["cu_q_lens"] = ends + [ends[-1]] * (layout.num_rows + 1 - len(ends))
    return fields | {"num_seqs": len(scheduled), "num_tokens": ends[-1]}


def _add_tokens(fields: dict[str, Any], row: int, at: int, item: Scheduled, layout: PackLayout) -> None:
    sequence, end = item.sequence, item.start + item.length
    for place, position in enumerate(range(item.start, end), at):
        if position < len(sequence.tokens):
            fields["token_ids"][place] = sequence.tokens[position]
        else:
            fields["from_slot"][place] = sequence.slot
        fields["positions"][place], fields["seq_of_token"][place] = position, row
        for index, pages in zip(fields["kv_index"], sequence.pages, strict=True):
            index[place] = pages[position // layout.page_size] * layout.page_size + position % layout.page_size
        prompt = sequence.request.prompt_token_ids
        if sequence.request.params.prompt_logprobs is not None and position + 1 < len(prompt):
            fields["prompt_targets"][place], fields["any_prompt_logprobs"] = prompt[position + 1], 1
    for table, pages in zip(fields["page_table"], sequence.pages, strict=True):
        table[row][: len(pages)] = pages
    fields["kv_lens"][row], fields["sample_at"][row] = end, at + item.length - 1


def _add_sampling(fields: dict[str, Any], row: int, item: Scheduled) -> None:
    sequence, request, params = item.sequence, item.sequence.request, item.sequence.request.params
    place = item.start + item.length - len(request.prompt_token_ids)
    fields["slots"][row], fields["output_position"][row] = sequence.slot, place
    if params.logprobs is not None:
        fields["any_logprobs"] = 1
    if request.biases:
        fields["is_biased"][row] = fields["any_biases"] = 1
    if request.forced_token_ids:
        script = [*request.forced_token_ids[place : place + 1], min(request.eos_token_ids, default=-1)]
        fields["forced_id"][row] = script[0]
    if sequence.constraint is not None and sequence.constraint.mask is not None:
        fields["any_masks"] = 1
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        fields["any_penalties"] = 1
        fields["presence_penalty"][row] = params.presence_penalty
        fields["frequency_penalty"][row] = params.frequency_penalty
        fields["repetition_penalty"][row] = min(LARGEST, max(1 / LARGEST, params.repetition_penalty))
    if params.temperature >= 1e-5:
        fields["any_random"] = 1
        for name in ("temperature", "top_p", "min_p"):
            fields[name][row] = getattr(params, name)
        fields["top_k"][row], fields["choice"][row] = max(params.top_k, 0), request.choice
        halves = np.array([request.seed % 2**64], "<u8").view("<i4")
        fields["seed_low"][row], fields["seed_high"][row] = halves.tolist()
        if params.top_p < 1 or params.min_p or params.top_k > 0:
            fields["any_filter"] = 1


def check_packed(flat: np.ndarray, scheduled: Sequence[Scheduled], layout: PackLayout) -> None:
    """Raises AssertionError where a packed step is not what it must be."""
    fields = packed_by_definition(scheduled, layout)
    assert set(fields) == set(layout.shapes())
    for name, values in fields.items():
        found, floats = layout.view(flat, name), np.asarray(values).dtype.kind == "f"
        expected = np.asarray(values, np.float32 if floats or name in FLOATS else np.int32)
        expected = expected.reshape(layout.shapes()[name])
        assert np.array_equal(found.view(expected.dtype) if found.ndim else found, expected), (name, found, values)


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
