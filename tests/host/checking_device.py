"""A device that does nothing but check: every cell that a sequence reads must hold that sequence's own token."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from tpu_serve.request import FinishReason, Request, TokenLogprobs
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
    ended_by_token: bool = False
    num_computed: int = 0
    num_wasted: int = 0
    received: int = 0
    num_cached: int | None = None

    @classmethod
    def of(cls, request: Request, arrival: int, max_model_len: int) -> Alone:
        tokens, params = list(request.prompt_token_ids), request.params
        limit = min(len(tokens) + params.max_tokens, max_model_len)
        watcher = request.constraint
        while True:
            tokens.append(next_token(tokens))
            count = len(tokens) - len(request.prompt_token_ids)
            if tokens[-1] in request.eos_token_ids and not params.ignore_eos:
                return cls(request, arrival, tokens, FinishReason.STOP, None, True)
            if tokens[-1] in params.stop_token_ids:
                return cls(request, arrival, tokens, FinishReason.STOP, tokens[-1], True)
            if watcher is not None and count == watcher.fails:
                return cls(request, arrival, tokens, FinishReason.ERROR, None)
            if watcher is not None and count == watcher.finishes:
                return cls(request, arrival, tokens, FinishReason.STOP, None)
            if len(tokens) == limit:
                return cls(request, arrival, tokens, FinishReason.LENGTH, None)

    def token(self, position: int) -> int:
        """The token of a position, the one past the end included: a row launched before the end was known computes it."""
        return self.tokens[position]

    def prompt_logprobs(self, start: int, end: int) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens at positions `start + 1` up to `end`, when asked for."""
        if self.request.params.prompt_logprobs is None:
            return ()
        last = min(end + 1, len(self.request.prompt_token_ids))
        return tuple(TokenLogprobs(self.tokens[position], -float(position)) for position in range(start + 1, last))


@dataclass
class Row:
    """A scheduled row as it was when the step was launched."""

    alone: Alone
    sequence: Sequence
    start: int
    end: int
    samples: bool
    slot: int
    pages: list[list[int]]
    known: list[int]
    restore: int = -1
    snapshot: int = -1
    num_steps: int = 1

    @property
    def last_end(self) -> int:
        """Where it is once all its steps have run."""
        return self.end + self.num_steps - 1

    @property
    def is_over(self) -> bool:
        """Launched before its end was known: what it computes belongs to nobody."""
        return self.start >= len(self.alone.tokens)

    def ends_with(self, token: int) -> bool:
        """Whether the device sees that the sequence is finished."""
        request = self.alone.request
        return (
            token in request.eos_token_ids and not request.params.ignore_eos
        ) or token in request.params.stop_token_ids

    def step(self, number: int, page_size: int) -> Row:
        """One of its steps by itself."""
        start, end = self.start + number, self.end + number
        is_kept = self.num_steps == 1 or end == self.last_end // page_size * page_size
        return replace(self, start=start, end=end, num_steps=1, snapshot=self.snapshot if is_kept else -1)


class CheckingDevice:
    """Executes rows in order, on cells that remember which token of which position was written, and on states that remember everything
    they have seen.

    Args:
      windows: of each pool of pages; None for one that is read from the beginning.
      has_state: whether there are recurrent layers.
    """

    def __init__(self, page_size: int, windows: tuple[int | None, ...], has_state: bool):
        self.page_size, self.windows, self.has_state = page_size, windows, has_state
        self.cells: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.last: dict[int, int] = {}
        self.states: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}

    def run(self, rows: list[Row]) -> list[SampledToken | None]:
        """Runs all steps of a launch; a row goes on until it has taken its own, or has sampled a token that ends its sequence."""
        results = self.step(rows)
        tokens = {index: [results[index]] for index, row in enumerate(rows) if row.num_steps > 1}
        for number in range(1, max(row.num_steps for row in rows)):
            left = [
                index
                for index, found in tokens.items()
                if number < rows[index].num_steps and not rows[index].ends_with(found[-1].token_id)
            ]
            sampled = self.step([rows[index].step(number, self.page_size) for index in left])
            for index, token in zip(left, sampled, strict=True):
                tokens[index].append(token)
        for index, found in tokens.items():
            unread = [SampledToken(-99)] * (rows[index].num_steps - len(found))
            results[index] = replace(found[0], later=(*found[1:], *unread))
        return results

    def step(self, rows: list[Row]) -> list[SampledToken | None]:
        rows = [row.step(0, self.page_size) for row in rows]
        written = set()
        for row in rows:
            for position in range(row.start, row.end):
                # What the host does not know yet is what the row's slot sampled last.
                token = row.known[position] if position < len(row.known) else self.last[row.slot]
                for pool in range(len(self.windows)):
                    cell = self.cell(row, pool, position)
                    assert cell not in written, "two rows write one cell"
                    written.add(cell)
                    self.cells[cell] = (token, position)
        for row in rows:
            for pool, window in enumerate(self.windows) if not row.is_over else ():
                for position in range(0 if window is None else max(0, row.start - window + 1), row.end):
                    held = self.cells[self.cell(row, pool, position)]
                    assert held == (row.alone.token(position), position), "a sequence reads what is not its own"
        if self.has_state:
            self.carry_states(rows)
        results: list[SampledToken | None] = []
        for row in rows:
            prompt_logprobs = row.alone.prompt_logprobs(row.start, row.end)
            token = next_token(row.alone.tokens[: row.end]) if row.samples and not row.is_over else None
            if row.is_over:
                token = next_token([row.start % 256])
            is_empty = token is None and not prompt_logprobs
            results.append(None if is_empty else SampledToken(token, prompt_logprobs=prompt_logprobs))
            if token is not None:
                self.last[row.slot] = token
        return results

    def cell(self, row: Row, pool: int, position: int) -> tuple[int, int, int]:
        page = row.pages[pool][position // self.page_size]
        assert page != 0, "a sequence uses a page that it has given back"
        return pool, page, position % self.page_size

    def carry_states(self, rows: list[Row]) -> None:
        for row in rows:
            if row.restore >= 0:
                before = self.snapshots[row.restore]
            else:
                before = self.states[row.slot] if row.start else []
            assert row.is_over or before == row.alone.tokens[: row.start], "a state has not seen what its sequence has"
        for row in rows:
            seen = row.alone.tokens[: row.end]
            self.states[row.slot] = seen
            if row.snapshot >= 0:
                self.snapshots[row.snapshot] = seen
