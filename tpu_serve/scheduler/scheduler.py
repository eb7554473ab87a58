"""Continuous batching: every step is a list of (sequence, how many of its tokens to compute).

Prefill, chunked prefill, decode and recompute after a preemption differ only in that number. `schedule` plans a step and assumes that it will
run; `commit` takes what it sampled. The engine plans step N+1 before it commits step N, so a sequence may have a token *in flight*: the
device knows it, the host does not yet. A page or slot that a launched step names is released only when that step is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.scheduler.page_pool import PagePool, hash_page
from tpu_serve.scheduler.sequence import Sequence, Status
from tpu_serve.scheduler.step import SampledToken, Scheduled, SchedulerOutput, SchedulerStats

NOT_A_NUMBER = "the model's output for this request is not a number"


class Scheduler:
    """First come, first served: running sequences in order of arrival, then waiting ones, within one token budget.

    Args:
      pool: pages of the KV cache; a single sequence of `max_model_len` tokens must fit.
      max_num_seqs: most sequences in a step.
      max_num_batched_tokens: most tokens in a step, at least `max_num_seqs`.
      max_model_len: longest sequence, prompt and answer together.
      enable_prefix_caching: look for and offer equal prompt beginnings.

    Raises:
      ValueError: the limits contradict one another.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ):
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is smaller than max_num_seqs ({max_num_seqs})"
            )
        if -(-max_model_len // pool.page_size) > pool.num_usable:
            raise ValueError(
                f"{pool.num_usable} pages of {pool.page_size} tokens cannot hold max_model_len {max_model_len}"
            )
        self.pool, self.max_num_seqs, self.max_model_len = pool, max_num_seqs, max_model_len
        self.max_num_batched_tokens, self.enable_prefix_caching = max_num_batched_tokens, enable_prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stats = SchedulerStats()
        self._by_id: dict[str, Sequence] = {}
        self._leaving: dict[Sequence, None] = {}  # preempted or finished, but a launched step still names them
        # A leaving sequence keeps its slot for one more step, so twice as many slots as rows never run out.
        self.num_slots = 2 * max_num_seqs
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._step_id = 0

    def reset(self) -> None:
        """Forgets every request, page, slot and cached prefix, in whatever state a step that was cut short left them. Counters stay."""
        self.pool = PagePool(self.pool.num_pages, self.pool.page_size)
        self.waiting.clear()
        self.running.clear()
        self._by_id.clear()
        self._leaving.clear()
        self._free_slots = list(range(self.num_slots - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queues a request.

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
        sequence = Sequence(request, min(num_prompt + request.params.max_tokens, self.max_model_len))
        self._by_id[request.id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        """Ends a request wherever it is; None when it is not here (already finished, say).

        `reason` is STOP when the frontend found a stop string in its text.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        self._finish(sequence, reason)
        return TokenOutput(request_id=request_id, finish_reason=reason, num_cached_tokens=sequence.num_cached)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    # ---- planning ---------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plans the next step; None when nothing can run before a launched step is committed."""
        scheduled: list[Scheduled] = []
        preempted: list[Sequence] = []
        budget = self._schedule_running(scheduled, preempted)
        self._admit(scheduled, budget)
        if not scheduled:
            return None
        scheduled.sort(key=lambda item: item.length > 1)  # stable: order of arrival within each group
        self._step_id += 1
        return SchedulerOutput(self._step_id, tuple(scheduled), tuple(preempted))

    def _schedule_running(self, scheduled: list[Scheduled], preempted: list[Sequence]) -> int:
        """Returns the budget left for waiting sequences: none while running ones are short of pages.

        Only the youngest can have more than one token to compute, since nothing is admitted behind a prompt that did not fit the budget.
        So every decode gets its token before a chunk takes the rest.
        """
        budget, page_size, short = self.max_num_batched_tokens, self.pool.page_size, False
        for sequence in tuple(self.running):
            if preempted and sequence.status is not Status.RUNNING:
                break  # preempted a moment ago, like all younger ones
            num_tokens = len(sequence.tokens) + sequence.num_inflight
            if num_tokens >= sequence.max_num_tokens:
                continue  # a token in flight is certainly its last: computing more would be thrown away
            length = min(num_tokens - sequence.num_computed, budget)
            num_missing = -(-(sequence.num_computed + length) // page_size) - len(sequence.pages)
            if num_missing > 0:
                # An older sequence that waits for pages gets them first. It waits rather than preempts while pages are about to come.
                while not short and num_missing > self.pool.num_free:
                    if self._leaving or self.running[-1] is sequence:
                        short = True
                    else:
                        preempted.append(self._preempt_youngest())
                if short:
                    continue
                sequence.pages += self.pool.take(num_missing)
            budget -= length
            scheduled.append(self._launch(sequence, length))
        return 0 if short or preempted else budget

    def _admit(self, scheduled: list[Scheduled], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if sequence.num_launched:  # preempted, and the step that still names it is under way
                break
            num_tokens = len(sequence.tokens)
            cached = self.pool.match(self._hashes(sequence, num_tokens - 1)) if self.enable_prefix_caching else []
            num_cached = len(cached) * self.pool.page_size
            # Room for all of its known tokens, though only the first chunk's pages are taken: admitting what cannot go on wastes work.
            if self._num_pages(num_tokens) - len(cached) + self.pool.num_revived(cached) > self.pool.num_free:
                break
            self.waiting.popleft()
            self.pool.retain(cached)
            if not sequence.num_preemptions:
                sequence.num_cached = num_cached
                self.stats.prefix_queries += num_tokens
                self.stats.prefix_hits += num_cached
            length = min(num_tokens - num_cached, budget)
            sequence.pages = cached + self.pool.take(self._num_pages(num_cached + length) - len(cached))
            sequence.num_computed, sequence.num_sealed = num_cached, len(cached)
            sequence.slot, sequence.status = self._free_slots.pop(), Status.RUNNING
            self.running.append(sequence)
            budget -= length
            scheduled.append(self._launch(sequence, length))

    def _launch(self, sequence: Sequence, length: int) -> Scheduled:
        start, num_known = sequence.num_computed, len(sequence.tokens)
        end = start + length
        samples = end == num_known + sequence.num_inflight
        sequence.num_computed = end
        sequence.num_launched += 1
        sequence.num_inflight += samples
        if start < num_known:
            self.stats.prompt_tokens_computed += max(0, min(end, sequence.num_prompt) - start)
            # Attention writes a step's keys and values before it reads any, so pages may be shared from this very step on.
            self._seal(sequence)
        return Scheduled(sequence, start, length, samples)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)

    def _hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Content hashes of the full pages among the first `num_tokens` tokens, which must be known."""
        size, hashes = self.pool.page_size, sequence.page_hashes
        for page in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else b""
            hashes.append(
                hash_page(parent, sequence.tokens[page * size : (page + 1) * size], sequence.request.cache_salt)
            )
        return hashes[: num_tokens // size]

    def _seal(self, sequence: Sequence) -> None:
        """Offers the pages that are full of known and computed tokens to the prefix cache."""
        num_tokens = min(sequence.num_computed, len(sequence.tokens))
        if num_tokens // self.pool.page_size == sequence.num_sealed or not self.enable_prefix_caching:
            return
        hashes = self._hashes(sequence, num_tokens)
        for page in range(sequence.num_sealed, len(hashes)):
            self.pool.seal(sequence.pages[page], hashes[page])
        sequence.num_sealed = len(hashes)

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _preempt_youngest(self) -> Sequence:
        """Takes the youngest running sequence's pages; it will recompute them. The queue stays in order of arrival."""
        sequence = self.running.pop()
        self.waiting.appendleft(sequence)
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
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        self.stats.finished[reason.value] += 1
        del self._by_id[sequence.request.id]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.num_launched:
            self._leaving[sequence] = None
            return
        self._leaving.pop(sequence, None)
        self.pool.release(sequence.pages)
        sequence.pages, sequence.num_computed, sequence.num_sealed = [], 0, 0
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    # ---- committing -------------------------------------------------------------------------------------------------

    def commit(self, output: SchedulerOutput, sampled: Seq[SampledToken | None]) -> list[TokenOutput]:
        """Takes the results of the oldest launched step, one entry per scheduled row (None where nothing was sampled)."""
        outputs = []
        for item, result in zip(output.scheduled, sampled, strict=True):
            sequence = item.sequence
            sequence.num_launched -= 1
            if item.samples:
                sequence.num_inflight -= 1
                if sequence.finish_reason is None:
                    assert result is not None
                    outputs.append(self._append(sequence, result))
            if not sequence.num_launched and sequence in self._leaving:
                self._leave(sequence)
        self.stats.generated += len(outputs)
        return outputs

    def _append(self, sequence: Sequence, result: SampledToken) -> TokenOutput:
        token_id, request = result.token_id, sequence.request
        if token_id < 0:
            self._finish(sequence, FinishReason.ERROR)
            return TokenOutput(request_id=request.id, finish_reason=FinishReason.ERROR, error=NOT_A_NUMBER)
        sequence.tokens.append(token_id)
        self._seal(sequence)
        reason, stop_token_id = None, None
        if token_id in request.eos_token_ids and not request.params.ignore_eos:
            reason = FinishReason.STOP
        elif token_id in request.params.stop_token_ids:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif len(sequence.tokens) >= sequence.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence, reason)
        return TokenOutput(
            request_id=request.id,
            token_ids=(token_id,),
            logprobs=None if result.logprobs is None else (result.logprobs,),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            ended_by_token=reason is FinishReason.STOP,
            num_cached_tokens=sequence.num_cached,
        )

    def check(self) -> None:
        """Checks every invariant; for tests and for an idle engine.

        Raises:
          AssertionError: something leaked or is held twice.
        """
        holders: Iterable[Sequence] = [*self.running, *self._leaving]
        self.pool.check([sequence.pages for sequence in holders])
        slots = [sequence.slot for sequence in holders]
        assert sorted([*slots, *self._free_slots]) == list(range(self.num_slots)), "slots leaked or are held twice"
        assert len(self.running) <= self.max_num_seqs
        assert all(sequence.num_tokens - sequence.num_computed == 1 for sequence in self.running[:-1])
        assert {*self.running, *self.waiting} == set(self._by_id.values())
        assert all(sequence.status is Status.RUNNING for sequence in self.running)
        assert all(sequence.status is Status.WAITING for sequence in self.waiting)
        assert all(not sequence.pages or sequence in self._leaving for sequence in self.waiting)
        assert all(sequence.num_launched for sequence in self._leaving)
