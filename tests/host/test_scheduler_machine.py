"""Random traffic on a device that does nothing but check: whatever is batched, shared, preempted or aborted, every cell that a
sequence reads holds its own token, and every answer is the one the sequence would have had alone. Beside it runs a scheduler that looks at the
pages of every row and remembers no match, which must plan and answer the same; and what is packed is what a definition of it says."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from checking_device import Alone, CheckingDevice, Row
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from packing_reference import check_packed
from watcher import Watcher

from tpu_serve.request import Bias, FinishReason, Request, SamplingParams, TokenOutput
from tpu_serve.runner.pack import Packer, PackLayout
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool, most_pages
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.sequence import Sequence, Status
from tpu_serve.scheduler.snapshots import Snapshots
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput

MAX_LAUNCHED = 2
pytestmark = pytest.mark.timeout(600)  # passes in seconds; a failure is first made small
PREFIXES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 1, 5, 9, 2, 7, 1, 8, 2, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]]


SAMPLING = (
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25},
    {"presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 2.0},
    {"logprobs": 2},
)


class CarefulCache(Cache):
    """Has every row looked at, as if something were to be done about its pages in each step, and every match made anew."""

    def grow(self, sequence: Sequence, end: int) -> None:
        super().grow(sequence, end)
        sequence.next_page_event = 0

    num_watched_changes = property(lambda self: object())


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prefix = draw(st.sampled_from(PREFIXES))
    return prefix[: draw(st.integers(0, len(prefix)))] + draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_tokens=st.integers(16, 48),
        spare=st.integers(0, 6),
        num_seqs=st.integers(1, 5),
        spare_budget=st.integers(0, 8),
        caching=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from([(None,), (None,), (None, 3), (None, 1, 6), (5,)]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 3, 9]),
        num_decode_steps=st.sampled_from([1, 1, 2, 3, 7]),
    )
    def make(
        self,
        page_size: int,
        num_tokens: int,
        spare: int,
        num_seqs: int,
        spare_budget: int,
        caching: bool,
        windows: tuple[int | None, ...],
        num_snapshots: int | None,
        num_decode_steps: int,
    ) -> None:
        self.page_size, self.max_model_len = page_size, num_tokens - num_tokens % page_size - spare % page_size
        self.max_num_seqs, self.budget = num_seqs, num_seqs + spare_budget
        self.windows, self.has_state = windows, num_snapshots is not None
        self.pools = [
            PagePool(1 + most_pages(num_tokens, self.budget, page_size, window) + spare, page_size, window)
            for window in windows
        ]
        self.cache = Cache(self.pools, None if num_snapshots is None else Snapshots(num_snapshots))
        pools = [PagePool(pool.num_pages, page_size, pool.window) for pool in self.pools]
        careful = CarefulCache(pools, None if num_snapshots is None else Snapshots(num_snapshots))
        self.scheduler, self.careful = (
            Scheduler(
                cache,
                max_num_seqs=num_seqs,
                max_num_batched_tokens=self.budget,
                max_model_len=self.max_model_len,
                enable_prefix_caching=caching,
                num_decode_steps=num_decode_steps,
            )
            for cache in (self.cache, careful)
        )
        self.layout = PackLayout(
            self.budget, num_seqs, -(-num_tokens // page_size), page_size, 2 * num_seqs, len(windows), num_snapshots
        )
        self.packer = Packer(self.layout)
        self.caching, self.device = caching, CheckingDevice(page_size, windows, self.has_state)
        self.alone: dict[str, Alone] = {}
        self.unfinished: dict[str, Alone] = {}
        self.launched: list[tuple[SchedulerOutput, list[Row], list[SampledToken | None]]] = []
        self.planned: list[SchedulerOutput | None] = []  # by the other scheduler
        self.num_added = self.num_finished = 0

    # ---- what can happen --------------------------------------------------------------------------------------------

    @rule(
        prompt=prompts(),
        copies=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.one_of(st.integers(1, 4), st.integers(5, 40)),
        eos=st.sampled_from([frozenset(), frozenset({0}), frozenset({0, 5})]),
        stop=st.sampled_from([(), (), (1,), (0, 3)]),
        ignore_eos=st.booleans(),
        salt=st.sampled_from(["", "", "", "other"]),
        priority=st.sampled_from([0, 0, 0, -1, 3]),
        watcher=st.sampled_from(
            [None, None, Watcher(False), Watcher(True), Watcher(True, 3), Watcher(False, 4), Watcher(True, 0, 3)]
        ),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        sampling=st.sampled_from(SAMPLING),
        others=st.sampled_from([{}, {}, {"biases": (Bias(3, 1.0),)}, {"forced_token_ids": (5, 7)}]),
    )
    def add(
        self,
        prompt: list[int],
        copies: int,
        max_tokens: int,
        eos: frozenset[int],
        stop: tuple[int, ...],
        ignore_eos: bool,
        salt: str,
        priority: int,
        watcher: Watcher | None,
        prompt_logprobs: int | None,
        sampling: dict[str, Any],
        others: dict[str, Any],
    ) -> None:
        for _ in range(copies):
            request = Request(
                id=f"r{self.num_added}",
                prompt_token_ids=tuple(prompt[: self.max_model_len - 1]),
                params=SamplingParams(
                    max_tokens=max_tokens,
                    stop_token_ids=stop,
                    ignore_eos=ignore_eos,
                    prompt_logprobs=prompt_logprobs,
                    **sampling,
                ),
                eos_token_ids=eos,
                cache_salt=salt,
                priority=priority,
                constraint=watcher,
                seed=-self.num_added,
                choice=self.num_added,
                **others,
            )
            self.scheduler.add(request)
            self.careful.add(request)
            self.alone[request.id] = self.unfinished[request.id] = Alone.of(request, self.num_added, self.max_model_len)
            self.num_added += 1

    @precondition(lambda self: self.unfinished and len(self.launched) < MAX_LAUNCHED)
    @rule(data=st.data(), abort_between=st.sampled_from([False] * 7 + [True]))
    def launch(self, data: st.DataObject, abort_between: bool) -> None:
        """Plans and launches a step; an abort may come in between."""
        output = self.schedule()
        if abort_between and self.unfinished:
            self.abort(data)
        if output is not None:
            rows = self.check_rows(output)
            self.launched.append((output, rows, self.device.run(rows)))

    @precondition(lambda self: self.launched)
    @rule()
    def commit(self) -> None:
        output, rows, results = self.launched.pop(0)
        expected = [row.alone for row in rows if row.samples and row.alone.request.id in self.unfinished]
        outputs = self.scheduler.commit(output, results)
        planned = self.planned.pop(0)
        twins = self.careful.commit(planned, results)
        for item in planned.scheduled:  # what has become known is offered at once, wherever it ends
            if item.sequence.status is Status.RUNNING:
                self.careful._prefixes.seal(item.sequence)
        assert list(map(untimed, outputs)) == list(map(untimed, twins))
        assert [item.request_id for item in outputs] == [alone.request.id for alone in expected]
        for item in outputs:
            self.receive(item)

    @precondition(lambda self: self.unfinished)
    @rule(times=st.integers(1, 12))
    def run_pipelined(self, times: int) -> None:
        """As the engine does: plan and launch the next step, then commit the one before, unless that must be known first."""
        for _ in range(times):
            if not self.unfinished and not self.launched:
                break
            if self.launched and self.scheduler.needs_last_tokens:
                self.commit()
                if not self.launched:
                    assert not self.scheduler.needs_last_tokens
            output = self.schedule() if len(self.launched) < MAX_LAUNCHED else None
            if output is not None:
                rows = self.check_rows(output)
                self.launched.append((output, rows, self.device.run(rows)))
            if len(self.launched) == MAX_LAUNCHED or (output is None and self.launched):
                self.commit()
            self.holds()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.unfinished)))
        output = self.scheduler.abort(request_id)
        assert (output.request_id, output.finish_reason, output.token_ids) == (request_id, FinishReason.ABORT, ())
        assert self.careful.abort(request_id) is not None
        assert self.scheduler.abort(request_id) is None
        del self.unfinished[request_id]
        self.num_finished += 1

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        num_pages = {sequence: len(sequence.pages[0]) for sequence in running}
        held = {sequence for sequence in running if sequence.needs_last_token}
        output, twin = scheduler.schedule(), self.careful.schedule()
        assert plan(output) == plan(twin)
        if twin is not None:
            self.planned.append(twin)
        assert scheduler.running[:1] == running[:1] or not running or not (output and output.preempted)
        if output is None:
            assert self.launched or not scheduler.has_work, "nothing runs and nothing will ever run"
            return None
        preempted, admitted = list(output.preempted), [one for one in scheduler.running if one not in num_pages]
        assert not preempted or not admitted
        assert preempted[::-1] == running[len(running) - len(preempted) :], "not the last in order were preempted"
        assert admitted == waiting[: len(admitted)], "somebody overtook somebody"
        self.check_waiting_for_pages(running, num_pages, held, output)
        return output

    def check_waiting_for_pages(
        self,
        running: list[Sequence],
        num_pages: dict[Sequence, int],
        held: set[Sequence],
        output: SchedulerOutput,
    ) -> None:
        """While budget is left, only pages hold a sequence back; then no younger one may get any."""
        if output.num_tokens == self.budget:
            return
        scheduled = {item.sequence for item in output.scheduled}
        held_back = False
        for sequence in [*running, *(one for one in self.scheduler.running if one not in num_pages)]:
            if sequence in held:
                assert sequence not in scheduled
                continue
            if sequence in scheduled:
                assert not held_back or len(sequence.pages[0] if sequence.pages else ()) == num_pages.get(sequence, 0)
                continue
            alone = self.unfinished[sequence.request.id]
            limit = min(len(alone.request.prompt_token_ids) + alone.request.params.max_tokens, self.max_model_len)
            held_back |= sequence.num_tokens < limit

    def check_rows(self, output: SchedulerOutput) -> list[Row]:
        """Takes down the rows as a packer would, and checks everything that needs no execution."""
        rows = []
        for item in output.scheduled:
            sequence, end = item.sequence, item.start + item.length
            row = Row(
                self.alone[sequence.request.id],
                sequence,
                item.start,
                end,
                item.samples,
                sequence.slot,
                [list(pages) for pages in sequence.pages],
                list(sequence.tokens),
                item.restore,
                item.snapshot,
                item.num_steps,
            )
            rows.append(row)
            self.check_position(row)
        assert rows
        assert output.num_steps == max(row.num_steps for row in rows) <= self.scheduler.num_decode_steps
        if output.num_steps > 1:
            assert all(row.end - row.start == 1 and row.samples and row.sequence.constraint is None for row in rows)
            assert not output.preempted
        assert len({row.sequence for row in rows}) == len(rows) <= self.max_num_seqs
        assert sum(row.end - row.start for row in rows) == output.num_tokens <= self.budget
        order = [(item.length > 1, item.is_first, item.sequence.order) for item in output.scheduled]
        assert order == sorted(order), "single tokens first, then those that ran before, each group in order"
        launched = [row for _, earlier, _ in self.launched for row in earlier]
        self.check_slots([*launched, *rows])
        packed = self.packer.pack((output.scheduled,), self.layout)
        check_packed(packed, output.scheduled, self.layout)
        for pool, window in enumerate(self.windows):
            # What lies behind a window is given back at once, for a later step to write.
            self.check_pages(rows if window is not None else [*launched, *rows], pool)
        return rows

    def check_position(self, row: Row) -> None:
        alone = row.alone
        request, length = alone.request, row.end - row.start
        assert length > 0
        if row.start != alone.num_computed:  # admitted, or admitted again after a preemption
            assert row.start % self.page_size == 0
            assert self.caching or row.start == 0
            assert all(row.sequence is not other.sequence for _, rows, _ in self.launched for other in rows)
        if alone.num_cached is None:
            alone.num_cached = row.start
            assert row.start < len(request.prompt_token_ids)
            assert row.start == 0 or request.params.prompt_logprobs is None
        alone.num_computed = row.last_end
        assert row.samples == (row.last_end == row.sequence.num_tokens - row.samples)
        watcher = row.sequence.constraint
        if watcher is not None:
            assert watcher.seen == row.known[len(request.prompt_token_ids) :]
            assert not watcher.follows or row.end <= len(row.known), "launched without knowing its last token"
        if row.samples:  # never past a limit that was known beforehand
            assert row.last_end < self.max_model_len
            assert row.last_end < len(request.prompt_token_ids) + request.params.max_tokens
        for pool, pages in zip(self.pools, row.pages, strict=True):
            assert len(pages) == -(-row.last_end // self.page_size)
            gone = pool.first_page(row.start)
            assert [page == 0 for page in pages] == [index < gone for index in range(len(pages))]
        assert self.has_state or (row.restore, row.snapshot) == (-1, -1)
        if row.end >= len(alone.tokens):
            alone.num_wasted += 1
            assert alone.num_wasted == 1
            assert alone.reason in (FinishReason.STOP, FinishReason.ERROR)
            assert watcher is None or not watcher.follows
        assert row.end <= len(alone.tokens) or self.scheduler.num_decode_steps > 1

    def check_slots(self, rows: list[Row]) -> None:
        """A slot has one sequence among all rows under way."""
        owner: dict[int, Sequence] = {}
        for row in rows:
            assert owner.setdefault(row.slot, row.sequence) is row.sequence

    def check_pages(self, rows: list[Row], pool: int) -> None:
        """A page has one sequence, or holds one content that only its first writer writes."""
        users: dict[int, dict[Sequence, tuple[int, Row]]] = {}
        writers: dict[int, set[Sequence]] = {}
        for row in rows:
            for index, page in enumerate(row.pages[pool]):
                if page:
                    users.setdefault(page, {})[row.sequence] = (index, row)
            for position in range(row.start, row.last_end):
                writers.setdefault(row.pages[pool][position // self.page_size], set()).add(row.sequence)
        for page, named in users.items():
            assert page != 0
            assert len(writers.get(page, ())) <= 1
            contents = set()
            for index, row in named.values():
                end = (index + 1) * self.page_size
                contents.add((index, row.alone.request.cache_salt, tuple(row.alone.tokens[:end])))
                assert len(named) == 1 or row.end >= end, "a page that is not full is shared"
            assert len(contents) == 1
            assert len(named) == 1 or self.caching

    def receive(self, output: TokenOutput) -> None:
        alone = self.unfinished[output.request_id]
        num_prompt = len(alone.request.prompt_token_ids)
        position = num_prompt + alone.received
        assert output.finish_reason is None or output.timing is not None
        if position + 1 == len(alone.tokens) and alone.reason is FinishReason.ERROR:
            assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, ())
            assert "is refused" in output.error
            del self.unfinished[output.request_id]
            self.num_finished += 1
            return
        is_first, count = not alone.received, len(output.token_ids)
        alone.received += count
        assert count
        assert output.token_ids == tuple(alone.tokens[position : position + count])
        assert output.num_cached_tokens == alone.num_cached
        wanted = is_first and alone.request.params.prompt_logprobs is not None
        assert output.prompt_logprobs == ((None, *alone.prompt_logprobs(0, num_prompt)) if wanted else None)
        if output.timing is not None:
            assert output.timing.num_prompt_computed == num_prompt - alone.num_cached
        if position + count < len(alone.tokens):
            assert (output.finish_reason, output.ended_by_token, output.stop_token_id) == (None, False, None)
            return
        assert output.finish_reason is alone.reason
        assert output.ended_by_token == alone.ended_by_token
        assert output.stop_token_id == alone.stop_token_id
        del self.unfinished[output.request_id]
        self.num_finished += 1

    @invariant()
    def holds(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        living = [*scheduler.running, *scheduler.waiting]
        assert {sequence.request.id for sequence in living} == set(self.unfinished)
        assert len(living) == len(self.unfinished)
        for queue in (scheduler.running, scheduler.waiting):
            order = [(one.request.priority, self.alone[one.request.id].arrival) for one in queue]
            assert order == sorted(order), "lower priorities first, then in order of arrival"
        assert scheduler.has_work == bool(self.unfinished)
        for _, rows, _ in self.launched:
            for row in rows:
                for pool, pages in zip(self.pools, row.pages, strict=True):
                    revived = pool.window is None and pool.num_revived(pages)
                    assert not revived, "a page is free while a launched step names it"
                assert row.sequence.slot == row.slot

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        work = sum(len(alone.tokens) for alone in self.unfinished.values())
        for _ in range(10 + 4 * work * (1 + len(self.unfinished))):
            if not self.launched and not self.scheduler.has_work:
                break
            self.run_pipelined(1)
        assert not self.unfinished, "requests are stuck"
        assert not self.launched
        assert self.cache.usage == 0
        self.scheduler.check()
        self.careful.check()
        stats = self.scheduler.stats
        assert sum(stats.finished.values()) == self.num_finished == self.num_added
        assert stats == self.careful.stats
        assert stats.generated == sum(alone.received for alone in self.alone.values())
        assert stats.prefix_hits == sum(alone.num_cached or 0 for alone in self.alone.values())
        assert self.cache.reset()


def plan(output: SchedulerOutput | None) -> Any:
    """Everything about a planned step but whose it is and what it says of pages that stay."""
    if output is None:
        return None
    rows = [
        (
            item.sequence.request.id,
            item.sequence.slot,
            item.sequence.pages,
            replace(item, sequence=None, has_new_pages=True),
        )
        for item in output.scheduled
    ]
    return output.step_id, rows, output.num_tokens, output.num_steps, [one.request.id for one in output.preempted]


def untimed(output: TokenOutput) -> TokenOutput:
    """But for the clock."""
    output = copy.copy(output)
    output.timing = None
    return output


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
