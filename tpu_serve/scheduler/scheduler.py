"""Continuous batching: every step is a list of (sequence, how many of its tokens to compute).

Prefill, chunked prefill, decode and recompute after a preemption differ only in that number. `schedule` plans a step and assumes that it will
run; `commit` takes what it sampled. The engine plans step N+1 before it commits step N, so a sequence may have tokens *in flight*: the
device knows them, the host does not yet. A page or slot that a launched step names is released only when that step is committed. A launch may
hold several decode steps; then all its rows decode.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, MutableSequence
from collections.abc import Sequence as Seq
from operator import attrgetter

from tpu_serve.request import NOT_A_NUMBER_ID, FinishReason, Request, TokenOutput
from tpu_serve.scheduler.cache import Cache, Match
from tpu_serve.scheduler.multi_step import plan_decode_steps
from tpu_serve.scheduler.prefixes import Prefixes
from tpu_serve.scheduler.sequence import Sequence, Status
from tpu_serve.scheduler.step import SampledToken, Scheduled, SchedulerOutput, SchedulerStats
from tpu_serve.scheduler.verdict import take_token, take_tokens


def num_slots(max_num_seqs: int) -> int:
    """Rows of per-sequence state. A leaving sequence keeps its slot for one more step, so twice as many as a step has never run out."""
    return 2 * max_num_seqs


_ORDER = attrgetter("order")


def _put(queue: MutableSequence[Sequence], sequence: Sequence) -> None:
    """Where it belongs, which is mostly one of the ends."""
    if not queue or queue[-1].order < sequence.order:
        queue.append(sequence)
    else:
        insort(queue, sequence, key=_ORDER)


class Scheduler:
    """Running sequences first, then waiting ones, within one token budget; in order of priority, those of one priority in order of arrival.

    A waiting sequence takes nothing from one that runs, whatever their priorities; the last in order loses its pages when others need them.

    Args:
      cache: the device's memory; a single sequence of `max_model_len` tokens must fit.
      max_num_seqs: most sequences in a step.
      max_num_batched_tokens: most tokens in a step, at least `max_num_seqs`.
      max_model_len: longest sequence, prompt and answer together.
      enable_prefix_caching: look for and offer equal prompt beginnings.
      num_decode_steps: most decode steps in one launch.

    Attributes:
      waiting, running: in order.
      num_waiting_tokens: prompt tokens of those waiting.

    Raises:
      ValueError: the limits contradict one another.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        num_decode_steps: int = 1,
    ):
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is smaller than max_num_seqs ({max_num_seqs})"
            )
        for pool in cache.pools:
            if pool.most_pages(max_model_len, max_num_batched_tokens) > pool.num_usable:
                raise ValueError(
                    f"{pool.num_usable} pages of {pool.page_size} tokens cannot hold max_model_len {max_model_len}"
                )
        self.cache, self.max_num_seqs, self.max_model_len = cache, max_num_seqs, max_model_len
        self.max_num_batched_tokens, self.enable_prefix_caching = max_num_batched_tokens, enable_prefix_caching
        self.num_decode_steps = num_decode_steps
        self._given_limits = max_num_seqs, max_num_batched_tokens
        self._prefixes = Prefixes(cache, enable_prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.num_waiting_tokens = 0
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self._by_id: dict[str, Sequence] = {}
        self._constrained: dict[Sequence, None] = {}
        self._leaving: dict[Sequence, None] = {}  # preempted or finished, but a launched step still names them
        self.num_slots = num_slots(max_num_seqs)
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._step_id = self._num_added = 0

    def limit_step(self, num_tokens: int) -> None:
        """Plans no more than so many tokens in a step from now on, and so no more sequences either, within the limits given at first. The
        number must not fall from call to call: those that run need a token each."""
        max_num_seqs, max_num_batched_tokens = self._given_limits
        self.max_num_batched_tokens = min(max_num_batched_tokens, num_tokens)
        self.max_num_seqs = min(max_num_seqs, num_tokens)

    def reset(self) -> None:
        """Forgets every request, page, slot and cached prefix, in whatever state a step that was cut short left them. Counters stay."""
        self.cache = self.cache.emptied()
        self._prefixes = Prefixes(self.cache, self.enable_prefix_caching)
        self.waiting.clear()
        self.num_waiting_tokens = 0
        self.running.clear()
        self._by_id.clear()
        self._constrained.clear()
        self._leaving.clear()
        self._free_slots = list(range(self.num_slots - 1, -1, -1))

    def add(self, request: Request, page_hashes: Iterable[bytes] = ()) -> None:
        """Queues a request.

        Args:
          page_hashes: what is known already of the content hashes of its full pages.

        Raises:
          ValueError: the id is in use, the prompt is empty or leaves no room for an answer, or max_tokens is unset.
        """
        if request.id in self._by_id:
            raise ValueError(f"request id {request.id!r} is in use")
        num_prompt = len(request.prompt_token_ids)
        if not 0 < num_prompt < self.max_model_len:
            raise ValueError(f"a prompt of {num_prompt} tokens does not fit a context of {self.max_model_len}")
        if request.params.max_tokens is None:
            raise ValueError("max_tokens must be set before a request reaches the scheduler")
        self._num_added += 1
        end = min(num_prompt + request.params.max_tokens, self.max_model_len)
        sequence = Sequence(request, end, self._num_added, page_hashes=list(page_hashes))
        self._by_id[request.id] = sequence
        if sequence.constraint is not None:
            self._constrained[sequence] = None
        self._wait(sequence)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix that no sequence holds; False when some are held and stay."""
        return self.cache.reset()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        """Ends a request wherever it is; None when it is not here (already finished, say).

        `reason` is STOP when the frontend found a stop string in its text.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        self._finish(sequence, reason)
        return TokenOutput(
            request_id=request_id,
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached,
            timing=sequence.timing(),
        )

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    @property
    def needs_last_tokens(self) -> bool:
        """Whether a running sequence is left out of steps until the launched one is committed, see `Constraint.follows`."""
        return any(sequence.status is Status.RUNNING and sequence.needs_last_token for sequence in self._constrained)

    def _wait(self, sequence: Sequence) -> None:
        _put(self.waiting, sequence)
        self.num_waiting_tokens += sequence.num_prompt

    # ---- planning ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plans the next step; None when nothing can run before a launched step is committed."""
        if self.cache.snapshots is not None:
            self.cache.snapshots.settle()
        if self.num_decode_steps > 1:
            several = self._schedule_several()
            if several is not None:
                return several
        singles: list[Scheduled] = []
        chunks: list[Scheduled] = []
        preempted: list[Sequence] = []
        budget = self._schedule_running(singles, chunks, preempted)
        if self.waiting:
            self._admit(singles, chunks, budget)
        if not singles and not chunks:
            return None
        self._step_id += 1
        num_tokens = len(singles) + sum(item.length for item in chunks)
        return SchedulerOutput(self._step_id, (*singles, *chunks), num_tokens, tuple(preempted))

    def _schedule_several(self) -> SchedulerOutput | None:
        """A launch of several decode steps; None where one step is to be planned, because somebody comes or for the reasons of
        `plan_decode_steps`."""
        if self.waiting and self._somebody_comes():
            return None
        counts = plan_decode_steps(self.running, self.cache, self.num_decode_steps)
        if counts is None:
            return None
        scheduled = []
        for sequence, count in zip(self.running, counts, strict=True):
            if count:
                self.cache.grow(sequence, sequence.num_computed + count)
                scheduled.append(self._launch(sequence, 1, num_steps=count))
        self._step_id += 1
        return SchedulerOutput(self._step_id, tuple(scheduled), len(scheduled), num_steps=max(counts))

    def _somebody_comes(self) -> bool:
        """Whether a waiting sequence gets in now, or when what is launched has been committed."""
        if any(one.num_tokens >= one.max_num_tokens for one in self.running):
            return True
        if len(self.running) >= self.max_num_seqs:
            return False
        return bool(self._leaving) or self._find_room(self.waiting[0]) is not None

    def _schedule_running(self, singles: list[Scheduled], chunks: list[Scheduled], preempted: list[Sequence]) -> int:
        """Returns the budget left for waiting sequences: none while running ones are short of pages.

        Every decode gets its token before a chunk takes the rest: usually only the youngest has more than one to compute, since nothing is
        admitted behind a prompt that did not fit the budget; and a chunk leaves one token for each sequence behind it.
        """
        budget, short = self.max_num_batched_tokens, False
        for index, sequence in enumerate(tuple(self.running)):
            if preempted and sequence.status is not Status.RUNNING:
                break  # preempted a moment ago, like all younger ones
            num_tokens = len(sequence.tokens) + sequence.num_inflight
            if num_tokens >= sequence.max_num_tokens:
                continue  # a token in flight is certainly its last: computing more would be thrown away
            if sequence.constraint is not None and sequence.needs_last_token:
                continue
            start = sequence.num_computed
            length = num_tokens - start
            if length == 1 and num_tokens < sequence.next_page_event:
                # A decode like most: its pages stay as they are, so nothing below has anything to do.
                sequence.num_computed = num_tokens
                sequence.num_launched += 1
                sequence.num_inflight += 1
                singles.append(Scheduled(sequence, start, 1, True, has_new_pages=False))
                budget -= 1
                continue
            if length > 1:
                length = self._prefixes.chunk(sequence, min(length, budget - max(0, len(self.running) - index - 1)))
            self.cache.trim(sequence, start)
            # An older sequence that waits for pages gets them first. It waits rather than preempts while pages are about to come.
            while not short and not self.cache.has_room(sequence, start + length):
                if self._leaving or self.running[-1] is sequence:
                    short = True
                else:
                    preempted.append(self._preempt_last())
            if short and not self._has_pages(sequence, start + length):
                continue
            self.cache.grow(sequence, start + length)
            budget -= length
            (singles if length == 1 else chunks).append(self._launch(sequence, length))
        return 0 if short or preempted else budget

    def _has_pages(self, sequence: Sequence, end: int) -> bool:
        return len(sequence.pages[0]) * self.cache.page_size >= end

    def _admit(self, singles: list[Scheduled], chunks: list[Scheduled], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.num_launched:  # preempted, and the step that still names it is under way
                break
            num_tokens = len(sequence.tokens)
            match = self._find_room(sequence)
            if match is None:
                break
            self.waiting.popleft()
            self.num_waiting_tokens -= sequence.num_prompt
            self.cache.hold(sequence, match)
            num_cached = match.num_pages * self.cache.page_size
            if sequence.admitted is None:
                sequence.admitted, sequence.num_cached = time.monotonic(), num_cached
                if self._prefixes.may_read(sequence):
                    self.stats.prefix_queries += num_tokens
                    self.stats.prefix_hits += num_cached
            sequence.num_computed, sequence.branch = num_cached, match.num_pages_seen * self.cache.page_size
            length = self._prefixes.chunk(sequence, min(num_tokens - num_cached, budget))
            self.cache.grow(sequence, num_cached + length)
            sequence.slot, sequence.status = self._free_slots.pop(), Status.RUNNING
            _put(self.running, sequence)
            budget -= length
            item = self._launch(sequence, length, match.snapshot, is_first=True)
            (singles if length == 1 else chunks).append(item)

    def _find_room(self, sequence: Sequence) -> Match | None:
        """What is cached of a waiting sequence; None where the rest does not fit now.

        There is room for all of its known tokens, though only the first chunk's pages are taken: admitting what cannot go on wastes work. So
        does taking the pages of a prompt whose chunk ended early, which others are admitted behind.
        """
        match = self._prefixes.match(sequence)
        unfinished = [one for one in self.running if one.num_computed < len(one.tokens)]
        promised = self.cache.still_to_take(unfinished, self.max_num_batched_tokens)
        fits = self.cache.has_room_for(match, len(sequence.tokens), self.max_num_batched_tokens, promised)
        if not fits:
            self._prefixes.remember(sequence, match)
            return None
        return match

    def _launch(
        self, sequence: Sequence, length: int, restore: int = -1, is_first: bool = False, num_steps: int = 1
    ) -> Scheduled:
        start, num_known = sequence.num_computed, len(sequence.tokens)
        end = start + length
        samples = end == num_known + sequence.num_inflight
        sequence.num_computed = end + num_steps - 1
        sequence.num_launched += 1
        sequence.num_inflight += num_steps if samples else 0
        snapshot = self._prefixes.take_snapshot(sequence, start, sequence.num_computed, num_steps)
        if start < num_known:
            known = min(end, sequence.num_prompt)
            self.stats.prompt_tokens_computed += max(0, known - start)
            sequence.num_prompt_computed = max(sequence.num_prompt_computed, known - sequence.num_cached)
            # Attention writes a step's keys and values before it reads any, so pages may be shared from this very step on.
            self._prefixes.seal(sequence)
        return Scheduled(sequence, start, length, samples, restore, snapshot, is_first, num_steps)

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _preempt_last(self) -> Sequence:
        """Takes the pages of the running sequence that is last in order; it will recompute them."""
        sequence = self.running.pop()
        self._wait(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._leave(sequence)
        return sequence

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_prompt
        self._constrained.pop(sequence, None)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        self.stats.finished[reason.value] += 1
        del self._by_id[sequence.request.id]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.num_launched:
            self._leaving[sequence] = None
            return
        self._leaving.pop(sequence, None)
        self.cache.release(sequence)
        sequence.num_computed = 0
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    # ---- committing -------------------------------------------------------------------------------------------------

    def commit(self, output: SchedulerOutput, sampled: Seq[SampledToken | None]) -> list[TokenOutput]:
        """Takes the results of the oldest launched step, one entry per scheduled row (None where it brought nothing)."""
        outputs, now = [], time.monotonic()
        for item, result in zip(output.scheduled, sampled, strict=True):
            sequence = item.sequence
            sequence.num_launched -= 1
            if result is not None and result.prompt_logprobs:
                sequence.take_prompt_logprobs(item.start, result.prompt_logprobs)
            if item.samples:
                sequence.num_inflight -= item.num_steps
                if sequence.finish_reason is None:
                    assert result is not None
                    if item.num_steps == 1:
                        outputs.append(self._append(sequence, result, now))
                    else:
                        outputs += self._append_several(sequence, result, now)
            if not sequence.num_launched and sequence in self._leaving:
                self._leave(sequence)
        self.stats.generated += sum(len(output.token_ids) for output in outputs)
        return outputs

    def _append(self, sequence: Sequence, result: SampledToken, now: float) -> TokenOutput:
        output = take_token(sequence, result, now)
        if not len(sequence.tokens) % self.cache.page_size:  # no page got full otherwise
            self._prefixes.seal(sequence)
        if output.finish_reason is not None:
            self.stats.num_not_numbers += result.token_id == NOT_A_NUMBER_ID
            self._finish(sequence, output.finish_reason)
        return output

    def _append_several(self, sequence: Sequence, result: SampledToken, now: float) -> list[TokenOutput]:
        outputs, last = take_tokens(sequence, (result, *result.later), now)
        reason = outputs[-1].finish_reason
        if reason is not None:
            # The device goes no further with a sequence that it finds finished, so no step has read its last token.
            sequence.num_computed = min(sequence.num_computed, len(sequence.tokens) - 1)
            self.stats.num_not_numbers += last.token_id == NOT_A_NUMBER_ID
        self._prefixes.seal(sequence)
        if reason is not None:
            self._finish(sequence, reason)
        return outputs

    def check(self) -> None:
        """Checks every invariant; for tests and for an idle engine.

        Raises:
          AssertionError: something leaked or is held twice.
        """
        holders: Iterable[Sequence] = [*self.running, *self._leaving]
        self.cache.check(holders)
        slots = [sequence.slot for sequence in holders]
        assert sorted([*slots, *self._free_slots]) == list(range(self.num_slots)), "slots leaked or are held twice"
        assert len(self.running) <= self.max_num_seqs
        if self.cache.snapshots is None:  # otherwise chunks end early, and others are admitted behind them
            assert sum(sequence.num_tokens - sequence.num_computed != 1 for sequence in self.running) <= 1
        for queue in (self.running, self.waiting):
            assert list(queue) == sorted(queue, key=_ORDER)
        assert self.num_waiting_tokens == sum(sequence.num_prompt for sequence in self.waiting)
        assert {*self.running, *self.waiting} == set(self._by_id.values())
        assert all(sequence.status is Status.RUNNING for sequence in self.running)
        assert all(sequence.status is Status.WAITING for sequence in self.waiting)
        assert all(not sequence.pages or sequence in self._leaving for sequence in self.waiting)
        assert all(sequence.num_launched for sequence in self._leaving)
