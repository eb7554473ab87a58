"""Writes a planned step into one flat int32 array, and reads it back as a `Batch` inside the compiled step.

One array means one transfer a step. Float fields travel as their bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.batch import Batch, SamplingRows
from tpu_serve.request import Request
from tpu_serve.scheduler.page_pool import PADDING_PAGE
from tpu_serve.scheduler.step import Scheduled

_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_FLOATS = ("temperature", "top_p", "min_p", *_PENALTIES)
MOST_REPETITION = 1e20
"""Stronger repetition penalties, and their inverse, count as this: logits stay far from the ends of float32."""
_STATE = ("state_read", "state_write", "snapshot_write")


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where each field of a batch lies in the flat array.

    Attributes:
      num_tokens: T, tokens of the bucket.
      num_rows: S, sequence rows of the bucket.
      max_pages: P, width of the page table.
      page_size: tokens per page.
      num_slots: slots of the device state; the value `num_slots` itself stands for "no slot".
      num_tables: page tables, one for each window.
      num_snapshots: rows of recurrent state behind those of the slots; None without such state. Their total stands for "no row".
    """

    num_tokens: int
    num_rows: int
    max_pages: int
    page_size: int
    num_slots: int
    num_tables: int = 1
    num_snapshots: int | None = None

    @property
    def num_state_rows(self) -> int:
        return self.num_slots + (self.num_snapshots or 0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every field, in the order in which they are packed."""
        tokens, rows = (self.num_tokens,), (self.num_rows,)
        return {
            **dict.fromkeys(("token_ids", "from_slot", "positions", "seq_of_token"), tokens),
            "kv_index": (self.num_tables, self.num_tokens),
            "page_table": (self.num_tables, self.num_rows, self.max_pages),
            "kv_lens": rows,
            "cu_q_lens": (self.num_rows + 1,),
            **dict.fromkeys(("num_seqs", "num_tokens"), ()),
            **dict.fromkeys(("sample_at", "slots"), rows),
            **dict.fromkeys(_STATE, (0,) if self.num_snapshots is None else rows),
            "prompt_targets": tokens,
            "any_prompt_logprobs": (),
            **{name: () if name.startswith("any_") else rows for name in SamplingRows.__dataclass_fields__},
        }

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())

    def views(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of the fields, floats as float32."""
        views, offset = {}, 0
        for name, shape in self.shapes().items():
            count = math.prod(shape)
            view = flat[offset : offset + count].reshape(shape)
            views[name] = view.view(np.float32) if name in _FLOATS else view
            offset += count
        return views

    def unpack(self, flat: jax.Array) -> Batch:
        """The batch inside a compiled step."""
        values: dict[str, jax.Array] = {}
        offset = 0
        for name, shape in self.shapes().items():
            count = math.prod(shape)
            value = jax.lax.slice(flat, (offset,), (offset + count,)).reshape(shape)
            values[name] = jax.lax.bitcast_convert_type(value, jnp.float32) if name in _FLOATS else value
            offset += count
        sampling = {name: values.pop(name) for name in SamplingRows.__dataclass_fields__}
        return Batch(**values, sampling=SamplingRows(**sampling))


def pack_ranks(by_rank: Sequence[tuple[Scheduled, ...]], layout: PackLayout) -> np.ndarray:
    """The flat arrays of the data ranks' rows, i32[ranks, layout.size]; i32[layout.size] where there is one rank."""
    flats = [pack(scheduled, layout) for scheduled in by_rank]
    return flats[0] if len(flats) == 1 else np.stack(flats)


def pack(scheduled: tuple[Scheduled, ...], layout: PackLayout) -> np.ndarray:
    """The flat array of a planned step, i32[layout.size]."""
    flat = np.zeros(layout.size, np.int32)
    fields = layout.views(flat)
    fields["from_slot"].fill(-1)
    fields["seq_of_token"].fill(-1)
    fields["kv_index"][...] = PADDING_PAGE * layout.page_size + np.arange(layout.num_tokens) % layout.page_size
    fields["slots"].fill(layout.num_slots)
    fields["top_p"].fill(1.0)
    fields["repetition_penalty"].fill(1.0)
    for name in ("forced_id", "prompt_targets"):
        fields[name].fill(-1)
    for name in _STATE:
        fields[name].fill(layout.num_state_rows)
    at = 0
    for row, item in enumerate(scheduled):
        if item.sequence.request.params.prompt_logprobs is not None:
            _pack_prompt_targets(item, at, fields)
        at = _pack_tokens(item, row, at, fields, layout.page_size)
        if layout.num_snapshots is not None:
            _pack_state(item, row, fields, layout)
        if item.samples:
            _pack_sampling(item, row, fields)
    fields["cu_q_lens"][len(scheduled) + 1 :] = at
    fields["num_seqs"][()] = len(scheduled)
    fields["num_tokens"][()] = at
    return flat


def _pack_tokens(item: Scheduled, row: int, at: int, fields: dict[str, np.ndarray], page_size: int) -> int:
    sequence, start, end = item.sequence, item.start, item.start + item.length
    stop = at + item.length
    if item.length == 1:  # a decode: scalar writes are several times faster than slices of one
        page, offset = divmod(start, page_size)
        fields["positions"][at] = start
        for table, index, pages in zip(fields["page_table"], fields["kv_index"], sequence.pages, strict=True):
            table[row, : len(pages)] = pages
            index[at] = pages[page] * page_size + offset
    else:
        positions = np.arange(start, end, dtype=np.int32)
        fields["positions"][at:stop] = positions
        for table, index, pages in zip(fields["page_table"], fields["kv_index"], sequence.pages, strict=True):
            table[row, : len(pages)] = pages
            index[at:stop] = table[row][positions // page_size] * page_size + positions % page_size
    known = max(start, min(end, len(sequence.tokens)))
    fields["token_ids"][at : at + known - start] = sequence.tokens[start:known]
    if known < end:  # the last token is in flight: the device reads its own copy
        fields["from_slot"][stop - 1] = sequence.slot
    fields["seq_of_token"][at:stop] = row
    fields["kv_lens"][row] = end
    fields["cu_q_lens"][row + 1] = stop
    fields["sample_at"][row] = stop - 1
    return stop


def _pack_prompt_targets(item: Scheduled, at: int, fields: dict[str, np.ndarray]) -> None:
    targets = prompt_targets(item)
    fields["prompt_targets"][at : at + len(targets)] = targets
    fields["any_prompt_logprobs"][()] |= bool(targets)


def prompt_targets(item: Scheduled) -> tuple[int, ...]:
    """Tokens of the prompt that follow the tokens of a row, as far as there are any."""
    return item.sequence.request.prompt_token_ids[item.start + 1 : item.start + item.length + 1]


def _pack_state(item: Scheduled, row: int, fields: dict[str, np.ndarray], layout: PackLayout) -> None:
    slot = item.sequence.slot
    if item.restore >= 0:
        fields["state_read"][row] = layout.num_slots + item.restore
    else:
        fields["state_read"][row] = slot if item.start else -1
    fields["state_write"][row] = slot
    if item.snapshot >= 0:
        fields["snapshot_write"][row] = layout.num_slots + item.snapshot


def _pack_sampling(item: Scheduled, row: int, fields: dict[str, np.ndarray]) -> None:
    sequence = item.sequence
    request, params = sequence.request, sequence.request.params
    position = item.start + item.length - sequence.num_prompt
    fields["slots"][row] = sequence.slot
    fields["output_position"][row] = position
    fields["any_logprobs"][()] |= params.logprobs is not None
    if request.biases:
        fields["is_biased"][row] = fields["any_biases"][()] = 1
    if request.forced_token_ids:
        fields["forced_id"][row] = forced_id(request, position)
    if _mask_of(item) is not None:
        fields["any_masks"][()] = 1
    if params.has_penalties:
        fields["presence_penalty"][row] = params.presence_penalty
        fields["frequency_penalty"][row] = params.frequency_penalty
        fields["repetition_penalty"][row] = min(max(params.repetition_penalty, 1 / MOST_REPETITION), MOST_REPETITION)
        fields["any_penalties"][()] = 1
    if params.is_greedy:
        return
    fields["temperature"][row] = params.temperature
    fields["top_p"][row] = params.top_p
    fields["min_p"][row] = params.min_p
    fields["top_k"][row] = max(0, params.top_k)
    seed = request.seed & 0xFFFF_FFFF_FFFF_FFFF
    fields["seed_low"].view(np.uint32)[row] = seed & 0xFFFF_FFFF
    fields["seed_high"].view(np.uint32)[row] = seed >> 32
    fields["choice"][row] = request.choice
    fields["any_random"][()] = 1
    fields["any_filter"][()] |= params.top_p < 1 or params.top_k > 0 or params.min_p > 0


def forced_id(request: Request, position: int) -> int:
    """The script's token at an output position, or the end behind it; -1 for none."""
    if position < len(request.forced_token_ids):
        return request.forced_token_ids[position]
    return min(request.eos_token_ids, default=-1)


def _mask_of(item: Scheduled) -> bytes | None:
    constraint = item.sequence.constraint
    return None if constraint is None or not item.samples else constraint.mask


def pack_masks(by_rank: Sequence[tuple[Scheduled, ...]], num_rows: int, vocab_size: int) -> np.ndarray | None:
    """Which ids each row may sample, u32[ranks * num_rows, ceil(vocab_size / 32)]; None if every row may sample all of them."""
    rows = ((rank * num_rows + row, item) for rank, rows in enumerate(by_rank) for row, item in enumerate(rows))
    masks = [(row, mask) for row, item in rows if (mask := _mask_of(item)) is not None]
    if not masks:
        return None
    words = np.full((len(by_rank) * num_rows, -(-vocab_size // 32)), 0xFFFF_FFFF, np.uint32)
    for row, mask in masks:
        words[row] = np.frombuffer(mask, "<u4")
    return words
