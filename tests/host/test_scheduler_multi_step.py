"""Launches of several decode steps: when they come, what they hold, and what becomes of tokens behind an end."""

from __future__ import annotations

import pytest
from scheduler_driver import EOS, STOP, WORD, add, rows, schedule
from watcher import Watcher

from tpu_serve.request import NOT_A_NUMBER_ID, FinishReason, TokenOutput
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.snapshots import Snapshots
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput


def make(
    steps: int = 4,
    *,
    pages: int = 64,
    seqs: int = 4,
    length: int = 60,
    window: int | None = None,
    snapshots: int | None = None,
) -> Scheduler:
    return Scheduler(
        Cache([PagePool(1 + pages, 4, window)], None if snapshots is None else Snapshots(snapshots)),
        max_num_seqs=seqs,
        max_num_batched_tokens=16,
        max_model_len=length,
        num_decode_steps=steps,
    )


def commit(scheduler: Scheduler, output: SchedulerOutput, **tokens: list[int]) -> dict[str, list[TokenOutput]]:
    """Plain words, after the tokens given for a request."""
    results: list[SampledToken | None] = []
    for item in output.scheduled:
        given = tokens.get(item.sequence.request.id, [])
        first, *later = [SampledToken(token) for token in (given + [WORD] * item.num_steps)[: item.num_steps]]
        first.later = tuple(later)
        results.append(first if item.samples else None)
    outputs: dict[str, list[TokenOutput]] = {}
    for one in scheduler.commit(output, results):
        outputs.setdefault(one.request_id, []).append(one)
    scheduler.check()
    return outputs


def counts(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(name, start, steps) of each row."""
    assert all(item.length == 1 and item.samples for item in output.scheduled)
    assert output.num_steps == max(item.num_steps for item in output.scheduled)
    assert output.num_tokens_in_all == sum(item.num_steps for item in output.scheduled)
    return [(item.sequence.request.id, item.start, item.num_steps) for item in output.scheduled]


def test_rows_take_what_they_have_left_and_launches_overlap() -> None:
    scheduler = make()
    add(scheduler, "a", 5, max_tokens=11)
    add(scheduler, "b", 3, max_tokens=4)
    first = schedule(scheduler)
    assert (rows(first), first.num_steps) == ([("a", 0, 5), ("b", 0, 3)], 1)
    second = schedule(scheduler)  # nobody knows the first token yet
    assert counts(second) == [("a", 5, 4), ("b", 3, 3)]
    assert [len(item.sequence.pages[0]) for item in second.scheduled] == [3, 2]
    commit(scheduler, first)
    third = schedule(scheduler)
    assert counts(third) == [("a", 9, 4)]
    found = commit(scheduler, second)
    assert {name: [one.token_ids for one in outputs] for name, outputs in found.items()} == {
        "a": [(WORD,) * 4],
        "b": [(WORD,) * 3],
    }
    assert found["b"][0].finish_reason is FinishReason.LENGTH
    last = schedule(scheduler)
    assert counts(last) == [("a", 13, 2)]
    commit(scheduler, third)
    assert scheduler.schedule() is None  # what is in flight ends it
    assert commit(scheduler, last)["a"][0].finish_reason is FinishReason.LENGTH
    assert scheduler.stats.generated == 15
    assert scheduler.cache.usage == 0


@pytest.mark.parametrize("token", [EOS, STOP])
def test_tokens_behind_an_end_are_dropped(token: int) -> None:
    scheduler = make()
    add(scheduler, "a", 5)
    commit(scheduler, schedule(scheduler))
    output, ahead = schedule(scheduler), schedule(scheduler)
    (found,) = commit(scheduler, output, a=[WORD, token, 99, 98])["a"]
    assert (found.token_ids, found.finish_reason, found.ended_by_token) == ((WORD, token), FinishReason.STOP, True)
    assert scheduler.cache.usage > 0  # a launched step still names its pages
    assert commit(scheduler, ahead) == {}
    assert scheduler.cache.usage == 0


def test_a_page_that_ends_with_an_unread_token_is_not_offered() -> None:
    """Without a next step its last token has no keys and values; what is full before it has."""
    for number_of_words, num_cached in ((1, 4), (2, 8)):
        scheduler = make()
        add(scheduler, "a", [20, 21, 22, 23, 24])
        commit(scheduler, schedule(scheduler))
        output = schedule(scheduler)
        (found,) = commit(scheduler, output, a=[WORD] * number_of_words + [EOS])["a"]
        tokens = [20, 21, 22, 23, 24, WORD, *found.token_ids]
        assert len(tokens) == 7 + number_of_words
        add(scheduler, "b", [*tokens, 30, 31])
        assert rows(schedule(scheduler)) == [
            ("b", num_cached if number_of_words == 2 else 4, len(tokens) + 2 - num_cached)
        ]


def test_an_error_comes_behind_the_tokens_before_it() -> None:
    scheduler = make()
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    commit(scheduler, schedule(scheduler))
    found = commit(scheduler, schedule(scheduler), a=[10, 11, NOT_A_NUMBER_ID], b=[NOT_A_NUMBER_ID])
    words, error = found["a"]
    assert (words.token_ids, words.finish_reason) == ((10, 11), None)
    assert [(one.token_ids, one.finish_reason) for one in (error, *found["b"])] == [((), FinishReason.ERROR)] * 2
    assert scheduler.stats.num_not_numbers == 2
    assert scheduler.stats.generated == 4


def test_an_abort_in_between() -> None:
    scheduler = make()
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    commit(scheduler, schedule(scheduler))
    output = schedule(scheduler)
    assert scheduler.abort("a") is not None
    assert counts(schedule(scheduler)) == [("b", 9, 4)]
    assert set(commit(scheduler, output)) == {"b"}


def test_who_arrives_is_admitted_at_once() -> None:
    scheduler = make(seqs=2)
    add(scheduler, "a", 5)
    commit(scheduler, schedule(scheduler))
    add(scheduler, "b", 20)
    assert rows(schedule(scheduler)) == [("a", 5, 1), ("b", 0, 15)]
    assert rows(schedule(scheduler)) == [("a", 6, 1), ("b", 15, 5)]  # the rest of the prompt
    assert counts(schedule(scheduler)) == [("a", 7, 4), ("b", 20, 4)]


def test_several_steps_while_nobody_who_waits_gets_in() -> None:
    scheduler = make(seqs=2)
    add(scheduler, "a", 5, max_tokens=6)
    add(scheduler, "b", 5)
    add(scheduler, "c", 5)
    commit(scheduler, schedule(scheduler))
    output = schedule(scheduler)
    assert counts(output) == [("a", 5, 4), ("b", 5, 4)]
    ahead = schedule(scheduler)
    assert counts(ahead) == [("a", 9, 1), ("b", 9, 4)]
    single = schedule(scheduler)  # the place of the first is free as soon as its last token is known
    assert (rows(single), single.num_steps) == ([("b", 13, 1)], 1)
    for one in (output, ahead):
        commit(scheduler, one)
    assert rows(schedule(scheduler)) == [("b", 14, 1), ("c", 0, 5)]


def test_a_constraint_makes_steps_single() -> None:
    scheduler = make()
    add(scheduler, "a", 5)
    add(scheduler, "b", 5, max_tokens=3, constraint=Watcher(follows=False))
    commit(scheduler, schedule(scheduler))
    for _ in range(2):
        output = schedule(scheduler)
        assert (rows(output)[0][0], output.num_steps) == ("a", 1)
        commit(scheduler, output)
    assert counts(schedule(scheduler)) == [("a", 7, 4)]


def test_steps_are_single_where_pages_are_missing() -> None:
    """Nobody loses pages so that others get several steps."""
    scheduler = make(pages=5, length=16)
    add(scheduler, "a", 7)
    add(scheduler, "b", 7)
    commit(scheduler, schedule(scheduler))
    output = schedule(scheduler)
    assert (rows(output), output.num_steps, output.preempted) == ([("a", 7, 1), ("b", 7, 1)], 1, ())


def test_pages_behind_a_window_stay_for_all_steps() -> None:
    scheduler = make(window=6)
    add(scheduler, "a", 10)
    commit(scheduler, schedule(scheduler))
    (item,) = schedule(scheduler).scheduled
    assert (item.start, item.num_steps) == (10, 4)
    assert [bool(page) for page in item.sequence.pages[0]] == [
        False,
        True,
        True,
        True,
    ]  # positions 5 and up, as for the first step


def test_recurrent_state_is_kept_where_a_page_ends_among_the_steps() -> None:
    scheduler = make(snapshots=4)
    add(scheduler, "a", [20, 21, 22, 23, 24])
    commit(scheduler, schedule(scheduler))
    commit(scheduler, schedule(scheduler))
    output = schedule(scheduler)
    (item,) = output.scheduled
    assert (item.start, item.num_steps) == (5, 4)
    assert item.snapshot >= 0  # after the 8 tokens of two pages
    commit(scheduler, output, a=[50, 51, 52, EOS])
    add(scheduler, "b", [20, 21, 22, 23, 24, WORD, 50, 51, 52, 60])
    (item,) = schedule(scheduler).scheduled
    assert (item.start, item.restore >= 0) == (8, True)
