"""Writes a planned step into one flat int32 array, and reads it back as a `Batch` inside the compiled step.

One array means one transfer a step. Float fields travel as their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.batch import Batch, SamplingRows
from tpu_serve.request import Request
from tpu_serve.runner.slot_rows import FIELDS, FLOATS, Needs, SlotRows
from tpu_serve.scheduler.page_pool import PADDING_PAGE
from tpu_serve.scheduler.step import Scheduled

_STATE = ("state_read", "state_write", "snapshot_write")
_FLAGS = {
    "any_random": int(Needs.RANDOM),
    "any_filter": int(Needs.FILTER),
    "any_logprobs": int(Needs.LOGPROBS),
    "any_biases": int(Needs.BIASES),
    "any_penalties": int(Needs.PENALTIES),
}
_A_LOOK = int(Needs.A_LOOK)


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
        """Shape of every field, in the order in which they are packed: `FIELDS` lie side by side, and the page table, much of which is often
        empty, comes last."""
        tokens, rows = (self.num_tokens,), (self.num_rows,)
        return {
            **dict.fromkeys(("token_ids", "from_slot", "positions", "seq_of_token", "prompt_targets"), tokens),
            "kv_index": (self.num_tables, self.num_tokens),
            "kv_lens": rows,
            "cu_q_lens": (self.num_rows + 1,),
            **dict.fromkeys(("sample_at", "slots"), rows),
            **dict.fromkeys(_STATE, (0,) if self.num_snapshots is None else rows),
            **dict.fromkeys((*FIELDS, "output_position", "forced_id"), rows),
            **dict.fromkeys(("num_seqs", "num_tokens", "any_prompt_logprobs", "any_masks", *_FLAGS), ()),
            "page_table": (self.num_tables, self.num_rows, self.max_pages),
        }

    @property
    def size(self) -> int:
        return _places(self)["page_table"][1]

    def view(self, flat: np.ndarray, name: str) -> np.ndarray:
        """A writable view of a field, floats as their bits."""
        start, stop, shape = _places(self)[name]
        return flat[start:stop].reshape(shape)

    def unpack(self, flat: jax.Array) -> Batch:
        """The batch inside a compiled step."""
        values: dict[str, jax.Array] = {}
        for name, (start, stop, shape) in _places(self).items():
            value = jax.lax.slice(flat, (start,), (stop,)).reshape(shape)
            values[name] = jax.lax.bitcast_convert_type(value, jnp.float32) if name in FLOATS else value
        sampling = {name: values.pop(name) for name in SamplingRows.__dataclass_fields__}
        return Batch(**values, sampling=SamplingRows(**sampling))


@functools.cache
def _places(layout: PackLayout) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """(start, stop, shape) of every field."""
    places, offset = {}, 0
    for name, shape in layout.shapes().items():
        start, offset = offset, offset + math.prod(shape)
        places[name] = start, offset, shape
    return places


@functools.cache
def _padding(layout: PackLayout) -> np.ndarray:
    """What a step without rows has before its page table."""
    flat = np.zeros(_places(layout)["page_table"][0], np.int32)
    places = PADDING_PAGE * layout.page_size + np.arange(layout.num_tokens) % layout.page_size
    layout.view(flat, "kv_index")[...] = places
    for name in ("from_slot", "seq_of_token", "prompt_targets", "forced_id"):
        layout.view(flat, name).fill(-1)
    layout.view(flat, "slots").fill(layout.num_slots)
    for name in _STATE:
        layout.view(flat, name).fill(layout.num_state_rows)
    for name in ("top_p", "repetition_penalty"):
        layout.view(flat, name).view(np.float32).fill(1.0)
    flat.setflags(write=False)
    return flat


class Packer:
    """Packs the steps of a runner. Most rows are decodes of one token that is in flight, all of which are packed together.

    Args:
      layout: of any of its buckets.
      num_ranks: data ranks.
    """

    def __init__(self, layout: PackLayout, num_ranks: int = 1):
        self.slots = [SlotRows(layout.num_slots, layout.num_tables, layout.max_pages) for _ in range(num_ranks)]

    def pack(self, by_rank: Sequence[tuple[Scheduled, ...]], layout: PackLayout) -> np.ndarray:
        """The flat arrays of the data ranks' rows, i32[ranks, layout.size]; i32[layout.size] where there is one rank. Every step is packed, in
        order: rows say only what is new of their sequences."""
        flats = [_pack(*rank, layout) for rank in zip(by_rank, self.slots, strict=True)]
        return flats[0] if len(flats) == 1 else np.stack(flats)


def _pack(scheduled: tuple[Scheduled, ...], kept: SlotRows, layout: PackLayout) -> np.ndarray:
    """The rows of one data rank, i32[layout.size]."""
    flat = np.zeros(layout.size, np.int32)
    head = _padding(layout)
    flat[: len(head)] = head
    if not scheduled:
        return flat
    num_rows = num_singles = len(scheduled)
    while num_singles and scheduled[num_singles - 1].length > 1:
        num_singles -= 1
    new = [(row, item) for row, item in enumerate(scheduled) if item.has_new_pages]
    for _, item in new:
        if item.is_first:
            kept.enter(item.sequence)
        else:
            kept.update_pages(item.sequence)
    slots = np.array([item.sequence.slot for item in scheduled], np.int32)
    starts = np.array([item.start for item in scheduled], np.int32)
    lengths = np.ones(num_rows, np.int32)
    lengths[num_singles:] = [item.length for item in scheduled[num_singles:]]
    stops, ends = np.cumsum(lengths, dtype=np.int32), starts + lengths

    layout.view(flat, "num_seqs")[()] = num_rows
    layout.view(flat, "num_tokens")[()] = stops[-1]
    layout.view(flat, "kv_lens")[:num_rows] = ends
    layout.view(flat, "sample_at")[:num_rows] = stops - 1
    offsets = layout.view(flat, "cu_q_lens")
    offsets[1 : num_rows + 1], offsets[num_rows + 1 :] = stops, stops[-1]
    num_pages = kept.num_pages[slots].max()
    layout.view(flat, "page_table")[:, :num_rows, :num_pages] = kept.page_table[:, slots, :num_pages]
    _pack_singles(scheduled[:num_singles], slots[:num_singles], starts[:num_singles], kept, flat, layout)
    for row in range(num_singles, num_rows):
        _pack_chunk(scheduled[row], row, int(stops[row]), kept, flat, layout)
    if layout.num_snapshots is not None:
        _pack_state(new, slots, starts, flat, layout)
    _pack_sampling(scheduled, slots, ends, kept, flat, layout)
    for row, item in new:  # tokens of a prompt are in no other row
        if item.sequence.request.params.prompt_logprobs is not None and (targets := prompt_targets(item)):
            at = stops[row] - item.length
            layout.view(flat, "prompt_targets")[at : at + len(targets)] = targets
            layout.view(flat, "any_prompt_logprobs")[()] = 1
    return flat


def _pack_singles(
    scheduled: Sequence[Scheduled],
    slots: np.ndarray,
    starts: np.ndarray,
    kept: SlotRows,
    flat: np.ndarray,
    layout: PackLayout,
) -> None:
    num, size = len(scheduled), layout.page_size
    layout.view(flat, "positions")[:num] = starts
    layout.view(flat, "seq_of_token")[:num] = np.arange(num, dtype=np.int32)
    page, offset = np.divmod(starts, np.int32(size))
    layout.view(flat, "kv_index")[:, :num] = kept.page_table[:, slots, page] * size + offset
    layout.view(flat, "from_slot")[:num] = slots
    known = [row for row, item in enumerate(scheduled) if item.start < len(item.sequence.tokens)]
    if known:  # the device has all others
        layout.view(flat, "from_slot")[known] = -1
        layout.view(flat, "token_ids")[known] = [scheduled[row].sequence.tokens[scheduled[row].start] for row in known]


def _pack_chunk(item: Scheduled, row: int, stop: int, kept: SlotRows, flat: np.ndarray, layout: PackLayout) -> None:
    sequence, size = item.sequence, layout.page_size
    at, end = stop - item.length, item.start + item.length
    positions = np.arange(item.start, end, dtype=np.int32)
    layout.view(flat, "positions")[at:stop] = positions
    layout.view(flat, "seq_of_token")[at:stop] = row
    tables = kept.page_table[:, sequence.slot]
    layout.view(flat, "kv_index")[:, at:stop] = tables[:, positions // size] * size + positions % size
    known = sequence.tokens[item.start : end]
    layout.view(flat, "token_ids")[at : at + len(known)] = known
    if len(known) < item.length:  # the last token is in flight: the device reads its own copy
        layout.view(flat, "from_slot")[stop - 1] = sequence.slot


def _pack_state(
    new: Sequence[tuple[int, Scheduled]], slots: np.ndarray, starts: np.ndarray, flat: np.ndarray, layout: PackLayout
) -> None:
    read = layout.view(flat, "state_read")
    read[: len(slots)] = np.where(starts > 0, slots, -1)
    layout.view(flat, "state_write")[: len(slots)] = slots
    for row, item in new:  # nothing begins or is kept where pages stay as they are
        if item.restore >= 0:
            read[row] = layout.num_slots + item.restore
        if item.snapshot >= 0:
            layout.view(flat, "snapshot_write")[row] = layout.num_slots + item.snapshot


def _pack_sampling(
    scheduled: Sequence[Scheduled],
    slots: np.ndarray,
    ends: np.ndarray,
    kept: SlotRows,
    flat: np.ndarray,
    layout: PackLayout,
) -> None:
    num = len(scheduled)
    columns = layout.view(flat, "slots")
    columns[:num] = slots
    positions = layout.view(flat, "output_position")
    positions[:num] = ends - kept.num_prompt[slots]
    silent = [row for row, item in enumerate(scheduled) if not item.samples]
    if silent:
        columns[silent], positions[silent] = layout.num_slots, 0
    start, stop = _places(layout)[FIELDS[0]][0], _places(layout)[FIELDS[-1]][1]
    flat[start:stop].reshape(len(FIELDS), -1)[:, :num] = kept.sampling[:, columns[:num]]
    needs = int(np.bitwise_or.reduce(kept.needs[columns[:num]]))
    for name, need in _FLAGS.items():
        if needs & need:
            layout.view(flat, name)[()] = 1
    if needs & _A_LOOK:
        _pack_changing(scheduled, flat, layout)


def _pack_changing(scheduled: Sequence[Scheduled], flat: np.ndarray, layout: PackLayout) -> None:
    for row, item in enumerate(scheduled):
        request = item.sequence.request
        if item.samples and request.forced_token_ids:
            position = item.start + item.length - item.sequence.num_prompt
            layout.view(flat, "forced_id")[row] = forced_id(request, position)
        if _mask_of(item) is not None:
            layout.view(flat, "any_masks")[()] = 1


def prompt_targets(item: Scheduled) -> tuple[int, ...]:
    """Tokens of the prompt that follow the tokens of a row, as far as there are any."""
    return item.sequence.request.prompt_token_ids[item.start + 1 : item.start + item.length + 1]


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
    masks = [
        (rank * num_rows + row, mask)
        for rank, rows in enumerate(by_rank)
        for row, item in enumerate(rows)
        if item.sequence.constraint is not None and (mask := _mask_of(item)) is not None
    ]
    if not masks:
        return None
    words = np.full((len(by_rank) * num_rows, -(-vocab_size // 32)), 0xFFFF_FFFF, np.uint32)
    for row, mask in masks:
        words[row] = np.frombuffer(mask, "<u4")
    return words
