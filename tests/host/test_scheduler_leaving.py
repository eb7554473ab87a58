"""How sequences leave the batch: preempted, finished, aborted, each with or without a step under way."""

from __future__ import annotations

import pytest
from scheduler_driver import EOS, STOP, WORD, add, commit, make, names, rows, schedule, step

from tpu_serve.request import FinishReason, TokenLogprobs
from tpu_serve.scheduler.step import SampledToken

# ---- preemption -----------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_waits_in_front_of_those_that_never_ran() -> None:
    scheduler = make(pages=4)
    for name in "abcde":
        add(scheduler, name, 4)
    assert step(scheduler) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 4), ("d", 0, 4)]
    output = schedule(scheduler)
    assert rows(output) == [("a", 4, 1), ("b", 4, 1)]
    assert names(output.preempted) == "dc"
    assert (names(scheduler.running), names(scheduler.waiting)) == ("ab", "cde")
    assert scheduler.stats.num_preemptions == 2


def test_a_preempted_sequence_recomputes_prompt_and_answer() -> None:
    scheduler = make(pages=4)
    add(scheduler, "a", 7, max_tokens=4)
    add(scheduler, "b", 6)
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == [("a", 8, 1)]  # the third page of a is the second of b
    assert step(scheduler) == [("a", 9, 1)]
    output = schedule(scheduler)
    assert rows(output) == [("b", 4, 4)]  # its first page was not overwritten, and is found like any prefix
    assert commit(scheduler, output)["b"].num_cached_tokens == 0  # of the prompt, when it first came
    assert scheduler.stats.prefix_hits == 0


def test_a_sequence_preempted_in_flight_keeps_its_token_and_returns_only_after_the_commit() -> None:
    scheduler = make(pages=3)
    add(scheduler, "a", 4, max_tokens=2)
    add(scheduler, "b", 5)
    first = schedule(scheduler)
    assert scheduler.schedule() is None  # a waits for the pages of b, which the first step still names
    b = scheduler.waiting[0]
    assert (b.num_inflight, len(b.pages[0]), b.slot) == (1, 2, 1)
    assert commit(scheduler, first, b=9)["b"].token_ids == (9,)
    assert (b.tokens[5:], b.pages, b.slot, b.num_inflight) == ([9], [], -1, 0)
    assert step(scheduler) == [("a", 4, 1)]
    assert step(scheduler) == [("b", 4, 2)]


def test_a_sequence_preempted_in_flight_does_not_return_early_though_pages_are_free() -> None:
    scheduler = make(pages=6, budget=21)
    for name, num_tokens in (("o", 4), ("a", 8), ("x", 4), ("b", 5)):
        add(scheduler, name, num_tokens)
    first = schedule(scheduler)
    scheduler.abort("x")
    second = schedule(scheduler)
    assert rows(second) == [("b", 5, 1)]  # o and a wait for the page of x
    commit(scheduler, first)
    third = schedule(scheduler)
    assert (rows(third), names(third.preempted)) == ([("o", 4, 1)], "b")  # a waits for those of b
    scheduler.abort("a")
    fourth = schedule(scheduler)
    assert rows(fourth) == [("o", 5, 1)]
    commit(scheduler, second)
    assert rows(schedule(scheduler)) == [("o", 6, 1), ("b", 4, 3)]
    commit(scheduler, third)
    commit(scheduler, fourth)


def test_recomputed_pages_are_shared_again() -> None:
    scheduler = make(pages=4, length=16)
    add(scheduler, "a", 4)
    add(scheduler, "b", 5)
    step(scheduler)
    while "a" in names(scheduler.running):
        step(scheduler)  # in the end it holds every page
    assert step(scheduler)[0][:2] == ("b", 0)
    add(scheduler, "bb", 5, max_tokens=1)
    assert step(scheduler)[-1] == ("bb", 4, 1)


def test_a_sequence_preempted_in_flight_may_turn_out_to_be_finished() -> None:
    scheduler = make(pages=3)
    add(scheduler, "a", 4)
    add(scheduler, "b", 5)
    first = schedule(scheduler)
    assert scheduler.schedule() is None
    assert commit(scheduler, first, b=EOS)["b"].finish_reason is FinishReason.STOP
    assert not scheduler.waiting
    assert scheduler.cache.pools[0].num_free == 2
    assert scheduler.stats.num_preemptions == 1


def test_pages_of_a_step_under_way_are_not_given_away() -> None:
    scheduler = make(pages=4)
    add(scheduler, "a", 4)
    add(scheduler, "b", 3)
    add(scheduler, "c", 5)
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert rows(second) == [("b", 3, 1)]  # a waits for a page of c, b needs none
    assert names(second.preempted) == "c"
    commit(scheduler, first)
    assert rows(schedule(scheduler)) == [("a", 4, 1), ("b", 4, 1)]
    commit(scheduler, second)


def test_while_an_older_sequence_waits_for_pages_younger_ones_take_none() -> None:
    scheduler = make(pages=4)
    for name in "abc":
        add(scheduler, name, 4)
    step(scheduler)  # one page is left
    output = schedule(scheduler)  # a takes it; b needs one
    assert rows(output) == [("a", 4, 1), ("b", 4, 1)]
    assert names(scheduler.waiting) == "c"
    add(scheduler, "d", 1)
    assert rows(schedule(scheduler)) == [("a", 5, 1), ("b", 5, 1)]


def test_nobody_is_preempted_for_pages_that_are_about_to_come() -> None:
    scheduler = make(pages=4)
    for name in "abcd":
        add(scheduler, name, 4)
    first = schedule(scheduler)
    scheduler.abort("b")
    assert scheduler.schedule() is None
    assert names(scheduler.running) == "acd"
    commit(scheduler, first)
    output = schedule(scheduler)
    assert rows(output) == [("a", 4, 1), ("c", 4, 1)]
    assert names(output.preempted) == "d"


def test_the_youngest_waits_for_pages_and_keeps_its_own() -> None:
    scheduler = make(pages=3)
    add(scheduler, "a", 4, max_tokens=3)
    add(scheduler, "b", 4)
    assert step(scheduler) == [("a", 0, 4), ("b", 0, 4)]
    assert step(scheduler) == [("a", 4, 1)]
    assert step(scheduler) == [("a", 5, 1)]
    assert step(scheduler) == [("b", 4, 1)]
    assert scheduler.stats.num_preemptions == 0


def test_the_youngest_loses_its_pages_when_an_older_one_needs_them() -> None:
    scheduler = make(pages=14, page_size=1, budget=4)
    add(scheduler, "a", 3)
    add(scheduler, "b", 8)
    assert step(scheduler) == [("b", 0, 1), ("a", 0, 3)]
    assert step(scheduler) == [("a", 3, 1), ("b", 1, 3)]
    assert step(scheduler) == [("a", 4, 1), ("b", 4, 3)]
    assert step(scheduler) == [("a", 5, 1), ("b", 7, 1)]  # all pages are held
    add(scheduler, "c", 1)
    output = schedule(scheduler)
    assert (rows(output), names(output.preempted)) == ([("a", 6, 1)], "b")
    commit(scheduler, output)
    scheduler.abort("a")
    assert step(scheduler) == [("c", 0, 1), ("b", 7, 2)]
    for name in "bc":
        scheduler.abort(name)
    assert scheduler.cache.usage == 0


def test_a_prefill_that_is_short_of_pages_waits_and_nobody_takes_those_that_are_left() -> None:
    scheduler = make(pages=34, page_size=1, seqs=8, budget=14, length=20)
    for name in "abcde":
        add(scheduler, name, 1, max_tokens=3)
    for name in "xy":
        add(scheduler, name, [1, 2, 3, 4, 5], max_tokens=9)
    add(scheduler, "p", 17)
    first, second = schedule(scheduler), schedule(scheduler)
    assert rows(second)[-1] == ("p", 3, 7)
    commit(scheduler, first)
    scheduler.abort("x")
    scheduler.abort("y")
    add(scheduler, "z", 1)
    third = schedule(scheduler)
    assert [row[0] for row in rows(third)] == list("abcde")  # now p needs seven pages and z one
    assert scheduler.cache.pools[0].num_free == 1
    assert (names(scheduler.running), third.preempted) == ("abcdep", ())
    commit(scheduler, second)
    assert rows(schedule(scheduler)) == [("z", 0, 1), ("p", 10, 7)]
    commit(scheduler, third)


# ---- finishing ------------------------------------------------------------------------------------------------------


def test_the_row_launched_after_an_unforeseen_end_is_thrown_away() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    first, second = schedule(scheduler), schedule(scheduler)
    a = scheduler.running[0]
    assert commit(scheduler, first, a=EOS)["a"].finish_reason is FinishReason.STOP
    assert not scheduler.has_work
    assert len(a.pages[0]) == 2  # the second step writes there
    assert a.slot >= 0
    assert commit(scheduler, second) == {}
    assert a.tokens[4:] == [EOS]
    assert (a.pages, a.slot, scheduler.cache.usage) == ([], -1, 0)
    assert scheduler.stats.generated == 1


def test_an_id_is_free_as_soon_as_its_request_ended() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    first, second = schedule(scheduler), schedule(scheduler)
    commit(scheduler, first, a=EOS)
    add(scheduler, "a", 5)
    third = schedule(scheduler)
    assert rows(third) == [("a", 4, 1)]
    assert commit(scheduler, second) == {}
    assert commit(scheduler, third, a=9)["a"].token_ids == (9,)


@pytest.mark.parametrize(
    ("token", "max_tokens", "stop", "ignore", "reason", "stop_token_id"),
    [
        (WORD, 20, STOP, False, None, None),
        (EOS, 20, STOP, False, FinishReason.STOP, None),
        (EOS, 20, EOS, False, FinishReason.STOP, None),  # the model's own end goes first
        (EOS, 20, STOP, True, None, None),
        (EOS, 20, EOS, True, FinishReason.STOP, EOS),
        (STOP, 20, STOP, False, FinishReason.STOP, STOP),
        (STOP, 20, STOP, True, FinishReason.STOP, STOP),
        (WORD, 1, STOP, False, FinishReason.LENGTH, None),
        (EOS, 1, STOP, False, FinishReason.STOP, None),
        (STOP, 1, STOP, False, FinishReason.STOP, STOP),
        (EOS, 1, STOP, True, FinishReason.LENGTH, None),
    ],
)
def test_what_ends_a_request(
    token: int, max_tokens: int, stop: int, ignore: bool, reason: FinishReason | None, stop_token_id: int | None
) -> None:
    scheduler = make()
    add(scheduler, "a", 4, max_tokens, stop=stop, ignore_eos=ignore)
    output = commit(scheduler, schedule(scheduler), a=token)["a"]
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ((token,), reason, stop_token_id)
    assert output.ended_by_token == (reason is FinishReason.STOP)
    assert scheduler.has_work == (reason is None)


def test_the_context_ends_a_request() -> None:
    scheduler = make(length=8)
    add(scheduler, "a", 6)
    assert commit(scheduler, schedule(scheduler))["a"].finish_reason is None
    assert commit(scheduler, schedule(scheduler))["a"].finish_reason is FinishReason.LENGTH


def test_logprobs_travel_with_their_token() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    logprobs = TokenLogprobs(WORD, -0.5, ((WORD, -0.5),))
    (output,) = scheduler.commit(schedule(scheduler), [SampledToken(WORD, logprobs)])
    assert output.logprobs == (logprobs,)
    (output,) = scheduler.commit(schedule(scheduler), [SampledToken(WORD)])
    assert output.logprobs is None


# ---- aborting -------------------------------------------------------------------------------------------------------


def test_an_unknown_request_cannot_be_aborted() -> None:
    scheduler = make()
    assert scheduler.abort("a") is None
    add(scheduler, "a", 4, max_tokens=1)
    commit(scheduler, schedule(scheduler))
    assert scheduler.abort("a") is None


@pytest.mark.parametrize("num_launched", [0, 1, 2])
@pytest.mark.parametrize("num_committed", [0, 1])
def test_abort_with_steps_under_way(num_launched: int, num_committed: int) -> None:
    """From waiting (nothing launched) to two steps under way, with and without a token already known."""
    scheduler = make()
    add(scheduler, "a", 4)
    for _ in range(num_committed):
        commit(scheduler, schedule(scheduler))
    launched = [schedule(scheduler) for _ in range(num_launched)]
    output = scheduler.abort("a")
    assert (output.request_id, output.finish_reason, output.token_ids) == ("a", FinishReason.ABORT, ())
    assert not scheduler.has_work
    assert (scheduler.cache.usage > 0) == (num_launched > 0)
    for output in launched:
        assert commit(scheduler, output) == {}
    assert scheduler.cache.usage == 0
    assert scheduler.stats.finished["abort"] == 1


@pytest.mark.parametrize("committed_before", [False, True])
def test_abort_after_a_preemption(committed_before: bool) -> None:
    scheduler = make(pages=3)
    add(scheduler, "a", 4)
    add(scheduler, "b", 5)
    first = schedule(scheduler)
    assert scheduler.schedule() is None
    if committed_before:
        commit(scheduler, first)
    assert scheduler.abort("b").finish_reason is FinishReason.ABORT
    scheduler.check()
    if not committed_before:
        assert list(commit(scheduler, first)) == ["a"]
    assert scheduler.cache.pools[0].num_free == 2
    assert step(scheduler) == [("a", 4, 1)]
