"""A request's life inside the engine."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from tpu_serve.request import Constraint, FinishReason, Request, Timing, TokenLogprobs


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state of one request. Only the scheduler changes it.

    Attributes:
      request: what was asked.
      max_num_tokens: length, prompt and answer together, at which it ends for certain.
      number: counts up with every request that arrives.
      order: sequences with a smaller one go first.
      num_prompt: tokens of the prompt.
      end_ids: tokens that end it.
      constraint: its own copy of the request's, which has accepted every token of the answer the host knows.
      tokens: prompt and every generated token the host knows.
      slot: row of the device's per-sequence state, owned from admission until no launched step names the sequence; -1 without one.
      pages: for each pool of the cache its pages, in order of the tokens they hold; empty while it holds none.
      page_hashes: chained content hashes of the leading full pages, computed once and kept.
      num_computed: leading tokens whose keys and values are cached once every launched step has run.
      num_cached: prompt tokens taken from the prefix cache at the first admission.
      num_inflight: sampled tokens that are launched but not yet known to the host.
      num_launched: launched steps that name this sequence and are not yet committed.
      num_sealed: leading pages offered to the prefix cache.
      next_page_event: how many tokens it has once something must be done about its pages; `Cache.grow` says what. 0 where that is not known.
      branch: tokens after which other sequences went another way, as far as the cache knows; 0 for nowhere.
      num_preemptions: how often the sequence lost its pages.
      num_prompt_computed: prompt tokens behind the cached ones that were ever computed; those computed again count once.
      prompt_logprobs: an entry per prompt token, None where it is not known yet; None when nobody asked, and once they are delivered.
      admitted, first_token, last_token: see `Timing`.
    """

    request: Request
    max_num_tokens: int
    number: int = 0
    order: tuple[int, int] = field(init=False)
    num_prompt: int = field(init=False)
    end_ids: frozenset[int] = field(init=False)
    constraint: Constraint | None = field(init=False)
    tokens: list[int] = field(init=False)
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_inflight: int = 0
    num_launched: int = 0
    num_sealed: int = 0
    next_page_event: int = 0
    branch: int = 0
    num_preemptions: int = 0
    num_prompt_computed: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = field(init=False)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.order = (request.priority, self.number)
        ends = frozenset() if request.params.ignore_eos else request.eos_token_ids
        self.end_ids = ends.union(request.params.stop_token_ids)
        self.constraint = None if request.constraint is None else request.constraint.copy()
        self.prompt_logprobs = None if request.params.prompt_logprobs is None else [None] * self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Tokens including those that launched steps will bring."""
        return len(self.tokens) + self.num_inflight

    @property
    def needs_last_token(self) -> bool:
        """Its next token, if there will be one, cannot be chosen before the host knows the one in flight."""
        if self.constraint is None or not self.num_inflight or self.num_tokens >= self.max_num_tokens:
            return False
        return self.constraint.follows

    def take_prompt_logprobs(self, start: int, entries: Iterable[TokenLogprobs]) -> None:
        """Keeps what a step that began at position `start` says of the prompt tokens behind it. Nothing is doubled after a preemption."""
        if self.prompt_logprobs is not None:
            for position, entry in enumerate(entries, start + 1):
                self.prompt_logprobs[position] = entry

    def timing(self) -> Timing:
        """Its stations so far."""
        return Timing(
            arrival=self.request.arrival,
            admitted=self.admitted,
            first_token=self.first_token,
            last_token=self.last_token,
            num_preemptions=self.num_preemptions,
            num_prompt_computed=self.num_prompt_computed,
        )
