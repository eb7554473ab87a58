"""What a sampled token means to its request: constraints, errors, log-probabilities of prompts, times."""

from __future__ import annotations

import pytest
from scheduler_driver import EOS, STOP, WORD, add, commit, make, rows, schedule, step
from watcher import Watcher

from tpu_serve.request import NOT_A_NUMBER_ID, NOTHING_ALLOWED_ID, FinishReason, TokenLogprobs, TokenOutput
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput

# ---- constraints ----------------------------------------------------------------------------------------------------


def test_a_sequence_that_needs_its_last_token_is_left_out_until_it_is_known() -> None:
    scheduler = make()
    add(scheduler, "a", 4, constraint=Watcher(True))
    add(scheduler, "b", 4)
    first = schedule(scheduler)
    assert scheduler.needs_last_tokens
    second = schedule(scheduler)
    assert rows(second) == [("b", 4, 1)]
    commit(scheduler, first)
    assert not scheduler.needs_last_tokens
    assert rows(schedule(scheduler)) == [("a", 4, 1), ("b", 5, 1)]


def test_a_constraint_that_follows_nothing_keeps_the_overlap() -> None:
    scheduler = make()
    add(scheduler, "a", 4, constraint=Watcher(False))
    schedule(scheduler)
    assert not scheduler.needs_last_tokens
    assert rows(schedule(scheduler)) == [("a", 4, 1)]


def test_every_sequence_follows_a_copy_of_its_own() -> None:
    scheduler, watcher = make(), Watcher(True)
    for name in "ab":
        add(scheduler, name, 4, constraint=watcher)
    commit(scheduler, schedule(scheduler), a=8, b=9)
    assert [sequence.constraint.seen for sequence in scheduler.running] == [[8], [9]]
    assert watcher.seen == []


def test_a_finished_constraint_ends_the_sequence_with_a_token_that_is_shown() -> None:
    scheduler = make()
    add(scheduler, "a", 4, constraint=Watcher(True, finishes=2))
    step(scheduler)
    output = commit(scheduler, schedule(scheduler))["a"]
    assert (output.finish_reason, output.ended_by_token, output.token_ids) == (FinishReason.STOP, False, (WORD,))
    assert not scheduler.has_work


@pytest.mark.parametrize(("token", "stop_token_id"), [(EOS, None), (STOP, STOP)])
def test_tokens_that_end_a_sequence_are_none_of_the_constraint(token: int, stop_token_id: int | None) -> None:
    scheduler = make()
    add(scheduler, "a", 4, constraint=Watcher(True, fails=1))
    output = commit(scheduler, schedule(scheduler), a=token)["a"]
    assert (output.finish_reason, output.stop_token_id, output.ended_by_token) == (
        FinishReason.STOP,
        stop_token_id,
        True,
    )


def test_a_token_that_is_refused_ends_only_its_request() -> None:
    scheduler = make()
    add(scheduler, "a", 4, constraint=Watcher(True, fails=2))
    add(scheduler, "b", 4)
    step(scheduler)
    outputs = commit(scheduler, schedule(scheduler))
    assert (outputs["a"].finish_reason, outputs["a"].token_ids) == (FinishReason.ERROR, ())
    assert outputs["a"].error == "number 2 is refused"
    assert outputs["b"].finish_reason is None
    assert scheduler.stats.generated == 3


@pytest.mark.parametrize(
    ("token", "words", "num_not_numbers"),
    [(NOT_A_NUMBER_ID, "is not a number", 1), (NOTHING_ALLOWED_ID, "no token was allowed", 0)],
)
def test_no_token_at_all_is_an_error(token: int, words: str, num_not_numbers: int) -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    outputs = commit(scheduler, schedule(scheduler), a=token)
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert words in outputs["a"].error
    assert outputs["b"].token_ids == (WORD,)
    assert scheduler.stats.num_not_numbers == num_not_numbers


# ---- log-probabilities of prompts -----------------------------------------------------------------------------------


def entry(position: int) -> TokenLogprobs:
    return TokenLogprobs(position, -float(position))


def commit_scored(scheduler: Scheduler, output: SchedulerOutput) -> dict[str, TokenOutput]:
    """Rows bring an entry for every prompt token behind those that they compute, as the device would."""
    results = []
    for item in output.scheduled:
        last = min(item.start + item.length + 1, item.sequence.num_prompt)
        wanted = item.sequence.request.params.prompt_logprobs is not None
        scored = tuple(entry(position) for position in range(item.start + 1, last)) if wanted else ()
        results.append(SampledToken(WORD if item.samples else None, prompt_logprobs=scored))
    return {one.request_id: one for one in scheduler.commit(output, results)}


def test_they_are_gathered_over_chunks_and_told_with_the_first_token() -> None:
    scheduler = make(budget=4, length=64)
    add(scheduler, "a", 10, prompt_logprobs=0)
    for expected in ({}, {}):
        assert commit_scored(scheduler, schedule(scheduler)) == expected
    output = commit_scored(scheduler, schedule(scheduler))["a"]
    assert output.prompt_logprobs == (None, *map(entry, range(1, 10)))
    assert commit_scored(scheduler, schedule(scheduler))["a"].prompt_logprobs is None


def test_cached_pages_are_not_read_for_them_but_may_be_read_by_others() -> None:
    scheduler = make(budget=16, length=64)
    for name in "ab":
        add(scheduler, name, list(range(12)), max_tokens=1, prompt_logprobs=0)
        output = schedule(scheduler)
        assert rows(output) == [(name, 0, 12)]
        told = commit_scored(scheduler, output)[name]
        assert told.prompt_logprobs == (None, *map(entry, range(1, 12)))
        assert told.num_cached_tokens == 0
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (0, 0)
    add(scheduler, "c", list(range(12)))
    assert rows(schedule(scheduler)) == [("c", 8, 4)]


def test_nothing_is_doubled_or_lost_when_a_prompt_is_computed_again() -> None:
    """b is preempted on the way, and its whole prompt computed once more."""
    scheduler = make(pages=14, page_size=1, budget=4)
    add(scheduler, "a", 3, max_tokens=9)
    add(scheduler, "b", 8, max_tokens=3, prompt_logprobs=0)
    add(scheduler, "c", 1, max_tokens=1)
    told: list[TokenOutput] = []
    launched = None
    while scheduler.has_work or launched:
        output = scheduler.schedule()
        scheduler.check()
        if launched is not None:
            told += [one for one in commit_scored(scheduler, launched).values() if one.request_id == "b"]
        launched = output
    assert scheduler.stats.num_preemptions > 0
    assert told[0].prompt_logprobs == (None, *map(entry, range(1, 8)))
    assert [one.prompt_logprobs for one in told[1:]] == [None, None]


# ---- times ----------------------------------------------------------------------------------------------------------


def test_times_are_told_with_the_first_token_and_at_the_end() -> None:
    scheduler = make(pages=4)
    add(scheduler, "x", 8, max_tokens=1)
    step(scheduler)
    add(scheduler, "x", 8, max_tokens=3)  # one page of it is cached
    arrival = scheduler.waiting[0].request.arrival
    outputs = []
    for _ in range(3):
        outputs.append(commit(scheduler, schedule(scheduler))["x"])
    first, middle, last = (output.timing for output in outputs)
    assert middle is None
    assert arrival == first.arrival <= first.admitted <= first.first_token == first.last_token
    assert (last.admitted, last.first_token) == (first.admitted, first.first_token)
    assert last.last_token > last.first_token
    assert (last.num_prompt_computed, last.num_preemptions) == (4, 0)


def test_a_request_that_ended_in_the_queue_was_never_admitted() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    timing = scheduler.abort("a").timing
    assert (timing.admitted, timing.first_token, timing.num_prompt_computed) == (None, None, 0)


def test_preemptions_are_counted_and_the_admission_is_the_first_one() -> None:
    scheduler = make(pages=3)
    add(scheduler, "a", 4, max_tokens=3)
    add(scheduler, "b", 5, max_tokens=3)
    first = schedule(scheduler)
    admitted = scheduler.running[1].admitted
    commit(scheduler, first)
    while scheduler.has_work:
        outputs = commit(scheduler, schedule(scheduler))
    timing = outputs["b"].timing
    assert (timing.num_preemptions, timing.admitted, timing.num_prompt_computed) == (1, admitted, 5)


# ---- the prefix cache -----------------------------------------------------------------------------------------------


def test_only_what_nobody_holds_is_forgotten() -> None:
    scheduler = make(length=64)
    add(scheduler, "a", list(range(9)), max_tokens=1)
    step(scheduler)
    add(scheduler, "b", list(range(50, 59)))
    step(scheduler)
    assert not scheduler.reset_prefix_cache(), "b runs"
    add(scheduler, "c", list(range(9)), max_tokens=1)
    add(scheduler, "d", list(range(50, 59)), max_tokens=1)
    assert rows(schedule(scheduler)) == [("b", 9, 1), ("d", 8, 1), ("c", 0, 9)]
    scheduler.reset()
    assert scheduler.reset_prefix_cache()
