"""A device that does nothing but check: every cell that a sequence reads must hold that sequence's own token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tpu_serve.request import FinishReason, Request
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import SampledToken

VOCABULARY = 12


def next_token(history: list[int]) -> int:
    return hashlib.sha256(bytes(history)).digest()[0] % VOCABULARY


@dataclass
class Alone:
    """What a request must get: its prompt continued by `next_token`, one at a time, until its own parameters end it."""

    request: Request
    arrival: int
    tokens: list[int]
    reason: FinishReason
    stop_token_id: int | None
    num_computed: int = 0
    num_wasted: int = 0
    received: int = 0
    num_cached: int | None = None

    @classmethod
    def of(cls, request: Request, arrival: int, max_model_len: int) -> Alone:
        tokens, params = list(request.prompt_token_ids), request.params
        limit = min(len(tokens) + params.max_tokens, max_model_len)
        while True:
            tokens.append(next_token(tokens))
            if tokens[-1] in request.eos_token_ids and not params.ignore_eos:
                return cls(request, arrival, tokens, FinishReason.STOP, None)
            if tokens[-1] in params.stop_token_ids:
                return cls(request, arrival, tokens, FinishReason.STOP, tokens[-1])
            if len(tokens) == limit:
                return cls(request, arrival, tokens, FinishReason.LENGTH, None)

    def token(self, position: int) -> int:
        """The token of a position, the one past the end included: a row launched before the end was known computes it."""
        return self.tokens[position]


@dataclass
class Row:
    """A scheduled row as it was when the step was launched."""

    alone: Alone
    sequence: Sequence
    start: int
    end: int
    samples: bool
    slot: int
    pages: list[int]
    known: list[int]


class CheckingDevice:
    """Executes rows in order on cells that remember which token of which position was written."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.last: dict[int, int] = {}

    def run(self, rows: list[Row]) -> list[SampledToken | None]:
        written = set()
        for row in rows:
            for position in range(row.start, row.end):
                # What the host does not know yet is what the row's slot sampled last.
                token = row.known[position] if position < len(row.known) else self.last[row.slot]
                cell = (row.pages[position // self.page_size], position % self.page_size)
                assert cell not in written, "two rows write one cell"
                written.add(cell)
                self.cells[cell] = (token, position)
        for row in rows:
            for position in range(row.end):
                cell = (row.pages[position // self.page_size], position % self.page_size)
                assert self.cells[cell] == (row.alone.token(position), position), "a sequence reads what is not its own"
        results: list[SampledToken | None] = []
        for row in rows:
            results.append(SampledToken(next_token(row.alone.tokens[: row.end])) if row.samples else None)
            if row.samples:
                self.last[row.slot] = results[-1].token_id
        return results
