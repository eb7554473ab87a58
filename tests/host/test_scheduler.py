"""What the scheduler plans: budget, order, pages, slots, prefixes. Random traffic is in `test_scheduler_machine.py`."""

from __future__ import annotations

import pytest
from scheduler_driver import WORD, add, commit, drain, make, rows, schedule, step

from tpu_serve.request import FinishReason, Request, SamplingParams
from tpu_serve.scheduler.page_pool import hash_page

# ---- the token budget -----------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_at_the_budget_and_samples_with_its_last_chunk() -> None:
    scheduler = make(budget=8, length=64)
    add(scheduler, "a", 20)
    outputs = []
    for _ in range(4):
        outputs.append(schedule(scheduler))
        commit(scheduler, outputs[-1])
    assert [rows(output) for output in outputs] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)], [("a", 20, 1)]]
    assert [output.scheduled[0].samples for output in outputs] == [False, False, True, True]
    assert [output.step_id for output in outputs] == [1, 2, 3, 4]


def test_prompts_fill_the_budget_that_decodes_leave() -> None:
    scheduler = make(budget=8, length=64)
    add(scheduler, "a", 3)
    add(scheduler, "b", 9)
    assert step(scheduler) == [("a", 0, 3), ("b", 0, 5)]
    add(scheduler, "c", 9)
    assert step(scheduler) == [("a", 3, 1), ("b", 5, 4), ("c", 0, 3)]
    assert step(scheduler) == [("a", 4, 1), ("b", 9, 1), ("c", 3, 6)]


def test_a_long_prefill_never_starves_decodes() -> None:
    scheduler = make(budget=4, seqs=4, pages=100, length=200)
    for name in "abc":
        add(scheduler, name, 1)
    step(scheduler)
    add(scheduler, "d", 50)
    for i in range(1, 20):
        assert step(scheduler) == [("a", i, 1), ("b", i, 1), ("c", i, 1), ("d", i - 1, 1)]


def test_rows_with_a_single_token_come_first_even_when_they_are_new() -> None:
    scheduler = make(length=64)
    add(scheduler, "a", 5)
    add(scheduler, "b", 1)
    add(scheduler, "c", 3)
    add(scheduler, "d", 1)
    assert step(scheduler) == [("b", 0, 1), ("d", 0, 1), ("a", 0, 5), ("c", 0, 3)]


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make(seqs=2, length=64)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=2)
    assert step(scheduler) == [("a", 0, 2), ("b", 0, 2)]
    assert step(scheduler) == [("a", 2, 1), ("b", 2, 1)]
    assert step(scheduler) == [("c", 0, 2)]


# ---- planning ahead -------------------------------------------------------------------------------------------------


def test_the_next_step_is_planned_before_the_last_one_is_committed() -> None:
    scheduler = make(length=64)
    add(scheduler, "a", 5)
    first, second = schedule(scheduler), schedule(scheduler)
    assert rows(second) == [("a", 5, 1)]
    assert scheduler.running[0].num_inflight == 2
    commit(scheduler, first, a=8)
    assert commit(scheduler, second, a=9)["a"].token_ids == (9,)
    assert scheduler.running[0].tokens[5:] == [8, 9]


@pytest.mark.parametrize(("max_tokens", "length"), [(2, 64), (20, 7)])
def test_no_step_is_launched_past_a_known_end(max_tokens: int, length: int) -> None:
    scheduler = make(length=length)
    add(scheduler, "a", 5, max_tokens)
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.schedule() is None
    commit(scheduler, first)
    assert scheduler.has_work
    assert commit(scheduler, second)["a"].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work
    assert scheduler.schedule() is None
    assert scheduler.cache.usage == 0


def test_slots_never_run_out_while_whole_batches_change() -> None:
    """Every sequence leaves with a wasted row under way, so that its slot is busy while the next batch starts."""
    scheduler = make(seqs=2, pages=64, length=64)
    assert scheduler.num_slots == 4
    launched = None
    for i in range(20):
        for name in ("ab", "cd")[i % 2]:
            scheduler.add(
                Request(
                    id=f"{name}{i}",
                    prompt_token_ids=(i, ord(name)),
                    params=SamplingParams(max_tokens=9),
                    eos_token_ids=frozenset({7}),
                )
            )
        for _ in range(2):
            output = schedule(scheduler)
            assert output is not None
            if launched is not None:
                commit(scheduler, launched)
            launched = output
    commit(scheduler, launched)
    assert scheduler.stats.finished["stop"] > 10


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_admitted_when_all_of_it_has_room() -> None:
    scheduler = make(pages=4, length=16, budget=8)
    add(scheduler, "a", 4, max_tokens=5)
    add(scheduler, "b", 13, max_tokens=1)
    assert step(scheduler) == [("a", 0, 4)]
    for i in range(4, 8):
        assert step(scheduler) == [("a", i, 1)]
    assert step(scheduler) == [("b", 0, 8)]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    scheduler = make(pages=4, length=16)
    add(scheduler, "a", 6, max_tokens=3)
    add(scheduler, "b", 12)
    add(scheduler, "c", 1)
    assert step(scheduler) == [("a", 0, 6)]
    assert step(scheduler) == [("a", 6, 1)]
    assert step(scheduler) == [("a", 7, 1)]
    assert step(scheduler) == [("c", 0, 1), ("b", 0, 12)]


# ---- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "hit"), [(3, 0), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8)], ids=lambda value: str(value)
)
def test_a_prefix_hit_is_as_long_as_the_full_pages_in_common(shared: int, hit: int) -> None:
    scheduler = make(length=64)
    add(scheduler, "a", [*range(shared), 50, 51], max_tokens=1)
    drain(scheduler)
    add(scheduler, "b", [*range(shared), 60, 61], max_tokens=1)
    output = schedule(scheduler)
    assert rows(output) == [("b", hit, shared + 2 - hit)]
    assert commit(scheduler, output)["b"].num_cached_tokens == hit


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_a_known_prompt_still_computes_a_token(num_tokens: int, hit: int) -> None:
    scheduler = make(length=64)
    for name in "ab":
        add(scheduler, name, list(range(num_tokens)), max_tokens=1)
        output = schedule(scheduler)
        assert rows(output) == [(name, hit if name == "b" else 0, num_tokens - (hit if name == "b" else 0))]
        commit(scheduler, output)


def test_equal_prompts_of_one_step_share_pages() -> None:
    scheduler = make(length=64)
    for name in "abc":
        add(scheduler, name, list(range(9)))
    output = schedule(scheduler)
    assert rows(output) == [("b", 8, 1), ("c", 8, 1), ("a", 0, 9)]
    a, b, c = scheduler.running
    assert a.pages[0][:2] == b.pages[0][:2] == c.pages[0][:2]
    assert len({a.pages[0][2], b.pages[0][2], c.pages[0][2]}) == 3
    assert scheduler.cache.pools[0].num_free == 64 - 5
    commit(scheduler, output)
    drain(scheduler)


def test_salts_keep_prefixes_apart() -> None:
    scheduler = make(length=64)
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x")):
        add(scheduler, name, list(range(9)), max_tokens=1, salt=salt)
    assert sorted(rows(schedule(scheduler))) == [("a", 0, 9), ("b", 0, 7)]
    assert sorted(rows(schedule(scheduler))) == [("b", 7, 2), ("c", 0, 9), ("d", 8, 1)]


def test_without_prefix_caching_everything_is_computed() -> None:
    scheduler = make(caching=False, length=64)
    for name in "ab":
        add(scheduler, name, list(range(8)))
    assert step(scheduler) == [("a", 0, 8), ("b", 0, 8)]
    assert scheduler.stats.prefix_hits == 0
    assert scheduler.cache.pools[0].match([hash_page(b"", range(4), "")]) == []


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_is_a_prefix_of_the_next_turn(overlap: bool) -> None:
    scheduler = make(length=64)
    add(scheduler, "a", list(range(5)), max_tokens=4)
    if overlap:
        outputs = [schedule(scheduler), schedule(scheduler)]
        while outputs:
            commit(scheduler, outputs.pop(0))
            if (output := scheduler.schedule()) is not None:
                outputs.append(output)
    drain(scheduler)
    add(scheduler, "b", [*range(5), 7, 7, 7, 7, 1])
    assert step(scheduler) == [("b", 8, 2)]


def test_a_page_filled_by_a_token_in_flight_is_shared_once_the_token_is_known() -> None:
    scheduler = make(length=64)
    add(scheduler, "a", [0, 1, 2])
    first = schedule(scheduler)
    second = schedule(scheduler)  # computes position 3 before the host knows what it holds
    add(scheduler, "b", [0, 1, 2, 7, 9])
    add(scheduler, "c", [0, 1, 2, 8, 9])
    commit(scheduler, first, a=7)
    assert rows(schedule(scheduler)) == [("a", 4, 1), ("b", 4, 1), ("c", 0, 5)]
    commit(scheduler, second)


def test_a_page_is_not_shared_before_all_its_tokens_are_known() -> None:
    scheduler = make(length=64)
    add(scheduler, "a", [0, 1])
    outputs = [schedule(scheduler) for _ in range(3)]  # the last one computes position 3, two tokens ahead of the host
    for output in outputs:
        commit(scheduler, output)
    add(scheduler, "b", [0, 1, 7, 7, 9])
    assert step(scheduler) == [("a", 4, 1), ("b", 4, 1)]


# ---- the door -------------------------------------------------------------------------------------------------------


def test_limits_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\)"):
        make(seqs=4, budget=3, length=64)
    with pytest.raises(ValueError, match="max_num_seqs"):
        make(seqs=0, length=64)
    with pytest.raises(ValueError, match="3 pages of 4 tokens cannot hold max_model_len 13"):
        make(pages=3, length=13)
    make(pages=3, length=12, seqs=4, budget=4)


def test_a_request_that_cannot_be_served_is_refused() -> None:
    scheduler = make(length=8)
    add(scheduler, "a", 7)
    with pytest.raises(ValueError, match="'a' is in use"):
        add(scheduler, "a", 3)
    with pytest.raises(ValueError, match="8 tokens does not fit a context of 8"):
        add(scheduler, "b", 8)
    with pytest.raises(ValueError, match="0 tokens"):
        add(scheduler, "b", 0)
    with pytest.raises(ValueError, match="max_tokens"):
        scheduler.add(Request(id="b", prompt_token_ids=(1,), params=SamplingParams()))
    assert len(scheduler.waiting) == 1
    drain(scheduler)
    add(scheduler, "a", 3)


def test_counters_count() -> None:
    scheduler = make(length=64)
    add(scheduler, "a", list(range(9)), max_tokens=2)
    add(scheduler, "b", list(range(9)), max_tokens=3)
    add(scheduler, "c", 3)
    step(scheduler)
    scheduler.abort("c")
    drain(scheduler)
    stats = scheduler.stats
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens_computed) == (21, 8, 13)
    assert (stats.generated, stats.num_preemptions) == (6, 0)
    assert stats.finished == {"stop": 0, "length": 2, "abort": 1, "error": 0}


def test_who_waits_for_pages_is_looked_up_again_only_when_its_prefix_comes_or_goes(monkeypatch) -> None:
    scheduler = make(pages=8, budget=20, length=24)
    lookups: list[int] = []
    match = scheduler.cache.match
    monkeypatch.setattr(scheduler.cache, "match", lambda hashes: lookups.append(len(hashes)) or match(hashes))
    add(scheduler, "a", [5, 6, 7])
    add(scheduler, "b", 16, max_tokens=8)
    step(scheduler)
    add(scheduler, "c", [5, 6, 7, WORD, WORD, WORD, WORD, WORD, *[9] * 8])
    counts = []
    for _ in range(5):
        lookups.clear()
        assert [name for name, _, _ in step(scheduler)] == ["a", "b"]
        counts.append(len(lookups))
    assert counts == [1, 0, 0, 0, 1]  # in the last one "a" fills its second page, which "c" can share
