"""A request's life inside the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tpu_serve.request import FinishReason, Request


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
      tokens: prompt and every generated token the host knows.
      slot: row of the device's per-sequence state, owned from admission until no launched step names the sequence; -1 without one.
      pages: for each pool of the cache its pages, in order of the tokens they hold; empty while it holds none.
      page_hashes: chained content hashes of the leading full pages, computed once and kept.
      num_computed: leading tokens whose keys and values are cached once every launched step has run.
      num_cached: prompt tokens taken from the prefix cache at the first admission.
      num_inflight: sampled tokens that are launched but not yet known to the host.
      num_launched: launched steps that name this sequence and are not yet committed.
      num_sealed: leading pages offered to the prefix cache.
      branch: tokens after which other sequences went another way, as far as the cache knows; 0 for nowhere.
      num_preemptions: how often the sequence lost its pages.
    """

    request: Request
    max_num_tokens: int
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
    branch: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens including those that launched steps will bring."""
        return len(self.tokens) + self.num_inflight
