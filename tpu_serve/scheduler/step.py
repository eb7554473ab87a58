"""What goes out of the scheduler and what comes back, for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from tpu_serve.request import FinishReason, TokenLogprobs
from tpu_serve.scheduler.sequence import Sequence


# One of each is made for every row of every step; a frozen one takes four times as long to make.
@dataclass(slots=True)
class Scheduled:
    """Compute `length` tokens of a sequence from position `start`.

    Attributes:
      samples: the last of them yields the next token.
      num_steps: how many tokens it samples in a launch of several steps, each of which is computed in the next step; 1 without `samples`.
      restore: snapshot that recurrent state starts from, -1 for the sequence's own state.
      snapshot: snapshot that takes its state afterwards, -1 for none; of several steps, after the last one that fills a page.
      is_first: first launch since the sequence got its slot; all its tokens are known then.
      has_new_pages: its pages may be others than at its last launch.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    restore: int = -1
    snapshot: int = -1
    is_first: bool = False
    num_steps: int = 1
    has_new_pages: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One planned launch: rows with a single token first, then longer chunks, each group in order of arrival.

    Attributes:
      num_tokens: of its first step.
      num_steps: decode steps that the device takes one after another, the largest `num_steps` of its rows. With more than one every row has a
        single token.
      ranks: what each data rank does of it, where there are several; their rows one rank after another are `scheduled`.
    """

    step_id: int
    scheduled: tuple[Scheduled, ...]
    num_tokens: int
    preempted: tuple[Sequence, ...] = ()
    num_steps: int = 1
    ranks: tuple[SchedulerOutput, ...] = ()

    @property
    def by_rank(self) -> tuple[tuple[Scheduled, ...], ...]:
        """The rows of each data rank."""
        return tuple(rank.scheduled for rank in self.ranks) or (self.scheduled,)

    @property
    def num_tokens_of_largest(self) -> int:
        """Tokens of the first step of the data rank that has most: all ranks take a bucket that holds as many."""
        return max((rank.num_tokens for rank in self.ranks), default=self.num_tokens)

    @property
    def num_tokens_in_all(self) -> int:
        """Tokens of all its steps."""
        if self.num_steps == 1:
            return self.num_tokens
        return sum(item.num_steps for item in self.scheduled)


@dataclass(slots=True)
class SampledToken:
    """What the device brought for one scheduled row.

    Attributes:
      token_id: sampled; `NOT_A_NUMBER_ID` or `NOTHING_ALLOWED_ID` where nothing could be, None where the row samples nothing.
      prompt_logprobs: of the tokens at positions `start + 1` up to `start + length` that belong to the prompt, when the request asked.
      later: what the further steps of a launch brought, as many as the row has. Behind a token that ends the sequence they mean nothing.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    later: tuple[SampledToken, ...] = ()


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; tokens unless said otherwise.

    Attributes:
      num_not_numbers: requests that ended because the model's output was not a number.
    """

    num_preemptions: int = 0
    num_not_numbers: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens_computed: int = 0
    generated: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
