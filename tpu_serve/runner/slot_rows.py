"""What the host keeps of the sequences that have slots, in the form in which steps take it: written when a sequence gets its slot and where its
pages change, so that packing a row is copying a column."""

from __future__ import annotations

import enum

import numpy as np

from tpu_serve.request import Request
from tpu_serve.scheduler.page_pool import PADDING_PAGE
from tpu_serve.scheduler.sequence import Sequence

_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
FLOATS = ("temperature", "top_p", "min_p", *_PENALTIES)
FIELDS = (
    "temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high", "choice", *_PENALTIES, "is_biased",
)  # fmt: skip
"""Those of `SamplingRows` that stay the same as long as a sequence has its slot."""
MOST_REPETITION = 1e20
"""Stronger repetition penalties, and their inverse, count as this: logits stay far from the ends of float32."""
NUM_ENDS = 8
"""Tokens that the device knows to end a row's sequence. The host finds the others when the launch is committed."""


class Needs(enum.IntFlag):
    """What the rows of a sequence need of a step besides the most probable token."""

    RANDOM = enum.auto()
    FILTER = enum.auto()
    LOGPROBS = enum.auto()
    BIASES = enum.auto()
    PENALTIES = enum.auto()
    A_LOOK = enum.auto()
    """Something that changes from token to token: a script, or a constraint that may have a mask."""


class SlotRows:
    """Columns of the slots of one data rank, and one behind them for rows without a slot, which asks for nothing.

    Attributes:
      sampling: i32[len(FIELDS), num_slots + 1], floats as their bits.
      needs: i32[num_slots + 1], of `Needs`.
      num_prompt: i32[num_slots + 1], tokens of the prompt.
      end_ids: i32[num_slots + 1, NUM_ENDS], tokens that end the sequence, -1 in unused entries.
      page_table: i32[num_tables, num_slots + 1, max_pages], page 0 where there is none.
      num_pages: i32[num_slots + 1], entries of each table that are in use, those behind windows included.
    """

    def __init__(self, num_slots: int, num_tables: int, max_pages: int):
        columns = num_slots + 1
        self.sampling = np.zeros((len(FIELDS), columns), np.int32)
        self.needs, self.num_prompt, self.num_pages = (np.zeros(columns, np.int32) for _ in range(3))
        self.end_ids = np.full((columns, NUM_ENDS), -1, np.int32)
        self.page_table = np.zeros((num_tables, columns, max_pages), np.int32)
        self._num_behind = np.zeros((num_tables, columns), np.int32)  # pages given back at the beginning
        floats = self.sampling.view(np.float32)
        self._of = {name: (floats if name in FLOATS else self.sampling)[place] for place, name in enumerate(FIELDS)}
        self._of["top_p"].fill(1.0)
        self._of["repetition_penalty"].fill(1.0)

    def enter(self, sequence: Sequence) -> None:
        """A sequence that got its slot."""
        slot, request = sequence.slot, sequence.request
        self.sampling[:, slot], needs = self.sampling[:, -1], _needs(sequence)
        self.needs[slot], self.num_prompt[slot] = needs, sequence.num_prompt
        ends = _end_ids(request)
        self.end_ids[slot, : len(ends)], self.end_ids[slot, len(ends) :] = ends, -1
        self.page_table[:, slot, : self.num_pages[slot]] = PADDING_PAGE
        self.num_pages[slot], self._num_behind[:, slot] = 0, 0
        self.update_pages(sequence)
        params, of = request.params, self._of
        of["is_biased"][slot] = bool(request.biases)
        if needs & Needs.PENALTIES:
            of["presence_penalty"][slot], of["frequency_penalty"][slot] = (
                params.presence_penalty,
                params.frequency_penalty,
            )
            of["repetition_penalty"][slot] = min(max(params.repetition_penalty, 1 / MOST_REPETITION), MOST_REPETITION)
        if needs & Needs.RANDOM:
            of["temperature"][slot], of["top_p"][slot], of["min_p"][slot] = (
                params.temperature,
                params.top_p,
                params.min_p,
            )
            of["top_k"][slot], of["choice"][slot] = max(0, params.top_k), request.choice
            of["seed_low"].view(np.uint32)[slot] = request.seed & 0xFFFF_FFFF
            of["seed_high"].view(np.uint32)[slot] = request.seed >> 32 & 0xFFFF_FFFF

    def update_pages(self, sequence: Sequence) -> None:
        """Pages that a sequence took at its end, and those at its beginning that it gave back, since it was last seen."""
        slot = sequence.slot
        known = int(self.num_pages[slot])
        for table, behind, pages in zip(self.page_table[:, slot], self._num_behind, sequence.pages, strict=True):
            table[known : len(pages)] = pages[known:]
            first = place = int(behind[slot])
            while place < len(pages) and pages[place] == PADDING_PAGE:
                place += 1
            table[first:place], behind[slot] = PADDING_PAGE, place
        self.num_pages[slot] = len(sequence.pages[0])


def _needs(sequence: Sequence) -> Needs:
    request, params, needs = sequence.request, sequence.request.params, Needs(0)
    if not params.is_greedy:
        needs |= Needs.RANDOM
        if params.top_p < 1 or params.top_k > 0 or params.min_p > 0:
            needs |= Needs.FILTER
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    if request.biases:
        needs |= Needs.BIASES
    if params.has_penalties:
        needs |= Needs.PENALTIES
    if sequence.constraint is not None or request.forced_token_ids:
        needs |= Needs.A_LOOK
    return needs


def _end_ids(request: Request) -> list[int]:
    ids = () if request.params.ignore_eos else request.eos_token_ids
    return [*ids, *request.params.stop_token_ids][:NUM_ENDS]
