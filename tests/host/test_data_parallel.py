"""Schedulers of several data ranks as one: who goes where, and that every token comes back to the sequence that it is of."""

from __future__ import annotations

import pytest
from checking_device import Alone, CheckingDevice, Row
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_driver import add, commit, drain, make, names, rows, schedule, step

from tpu_serve.request import FinishReason, Request, SamplingParams
from tpu_serve.scheduler.data_parallel import DataParallelScheduler


def make_ranks(count: int = 2, **sizes: int) -> DataParallelScheduler:
    return DataParallelScheduler([make(**sizes) for _ in range(count)])


def places(scheduler: DataParallelScheduler) -> list[str]:
    """Names of the requests on each rank."""
    return ["".join(sorted(one.request.id for one in (*rank.waiting, *rank.running))) for rank in scheduler.ranks]


def test_requests_go_where_fewest_tokens_are():
    scheduler = make_ranks(3, budget=32, length=40)
    for name, size in (("a", 9), ("b", 3), ("c", 5), ("d", 4), ("e", 1), ("f", 1)):
        add(scheduler, name, size)
    assert places(scheduler) == ["a", "bd", "cef"]
    assert (len(scheduler.waiting), len(scheduler.running), scheduler.num_waiting_tokens) == (6, 0, 23)
    step(scheduler)
    assert (len(scheduler.waiting), len(scheduler.running), scheduler.num_waiting_tokens) == (0, 6, 0)
    add(scheduler, "g", 1)
    assert places(scheduler) == ["a", "bdg", "cef"]  # each has one token more


def test_a_full_rank_is_passed_over_though_it_has_fewer_tokens():
    scheduler = make_ranks(seqs=1, budget=16)
    for name, size in (("a", 2), ("b", 9)):
        add(scheduler, name, size)
    scheduler.abort("b")
    step(scheduler)
    add(scheduler, "c", 8)
    assert places(scheduler) == ["a", "c"]


def test_a_step_has_the_rows_of_every_rank_one_after_another():
    scheduler = make_ranks()
    add(scheduler, "a", 9)
    add(scheduler, "b", 3)
    output = schedule(scheduler)
    assert rows(output) == [("a", 0, 9), ("b", 0, 3)]
    assert [[row.sequence.request.id for row in part] for part in output.by_rank] == [["a"], ["b"]]
    assert (output.num_tokens, output.num_tokens_of_largest) == (12, 9)
    outputs = commit(scheduler, output, a=40, b=50)
    assert {name: one.token_ids for name, one in outputs.items()} == {"a": (40,), "b": (50,)}
    scheduler.abort("a")
    output = schedule(scheduler)
    assert [len(part) for part in output.by_rank] == [0, 1]
    commit(scheduler, output)
    drain(scheduler)
    assert scheduler.schedule() is None


def test_a_request_is_here_once_and_can_be_aborted():
    scheduler = make_ranks()
    for name in "abc":
        add(scheduler, name, 3)
    with pytest.raises(ValueError, match="request id 'b' is in use"):
        add(scheduler, "b", 3)
    with pytest.raises(ValueError, match="does not fit a context"):
        add(scheduler, "long", 30)
    output = schedule(scheduler)
    assert scheduler.abort("b").finish_reason is FinishReason.ABORT
    assert scheduler.abort("b") is None
    assert sorted(commit(scheduler, output)) == ["a", "c"]
    add(scheduler, "b", 3)  # its name is free again
    add(scheduler, "long", 3)
    drain(scheduler)
    assert scheduler.stats.finished["abort"] == 1
    assert scheduler.stats.finished["length"] == 4
    assert scheduler.stats.generated == sum(rank.stats.generated for rank in scheduler.ranks)


def test_one_rank_short_of_pages_preempts_its_own_alone():
    scheduler = make_ranks(pages=5, page_size=2, length=10, budget=16, caching=False)
    for name, size in (("a", 4), ("b", 4), ("c", 4)):
        add(scheduler, name, size)
    assert places(scheduler) == ["ac", "b"]
    while not (output := schedule(scheduler)).preempted:
        commit(scheduler, output)
    assert names(output.preempted) == "c"
    assert [names(row.sequence for row in part) for part in output.by_rank] == ["a", "b"]
    commit(scheduler, output)
    drain(scheduler)
    assert [rank.stats.num_preemptions for rank in scheduler.ranks] == [scheduler.stats.num_preemptions, 0]


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_rank_is_much_more_loaded():
    scheduler = make_ranks(seqs=8, budget=8, length=40, pages=200)
    prompt = list(range(12))
    add(scheduler, "x", 4)
    add(scheduler, "a", prompt, 1)
    assert places(scheduler) == ["x", "a"]
    drain(scheduler)
    add(scheduler, "y", 20)
    assert places(scheduler) == ["y", ""]
    for name in "bcdef":  # the first two would go there in any case
        add(scheduler, name, [*prompt, 70 + ord(name)], 1)
    on_it = places(scheduler)[1]
    assert on_it.startswith("bcd")
    for name in "ghijkl":
        add(scheduler, name, [*prompt, 70 + ord(name)], 1)
    assert places(scheduler)[0] != "y", "all of them wait for one rank"
    drain(scheduler)
    assert scheduler.stats.prefix_hits > 3 * len(prompt)


def test_choices_of_one_request_share_a_rank_before_anything_is_cached():
    scheduler = make_ranks(length=40)
    prompt = list(range(12))
    for index in range(3):
        add(scheduler, f"a{index}", prompt, 2)
    add(scheduler, "b", prompt, 2, prompt_logprobs=0)  # reads nothing from the cache, so it goes where there is room
    assert places(scheduler) == ["a0a1a2", "b"]
    drain(scheduler)
    assert scheduler.stats.prefix_hits == 2 * 8


def test_reset_forgets_requests_and_prefixes_of_all_ranks():
    scheduler = make_ranks(length=40, budget=32)
    for name in "abcd":
        add(scheduler, name, 9)
    step(scheduler)
    assert not scheduler.reset_prefix_cache()  # pages are held
    before = scheduler.stats
    scheduler.reset()
    assert (places(scheduler), scheduler.has_work, scheduler.cache.usage) == (["", ""], False, 0)
    assert scheduler.stats == before
    add(scheduler, "a", 9)
    assert rows(schedule(scheduler)) == [("a", 0, 9)]
    scheduler.reset()
    assert scheduler.reset_prefix_cache()


def test_the_caches_as_one():
    scheduler = make_ranks(3, pages=10, page_size=4)
    (pool,) = scheduler.cache.pools
    assert (pool.num_pages, pool.num_usable, pool.page_size, pool.window) == (33, 30, 4, None)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (12, 48)
    add(scheduler, "a", 9)
    step(scheduler)
    assert scheduler.cache.usage == pytest.approx(3 / 30)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(2, 4), pages=st.integers(8, 14), caching=st.booleans())
def test_random_traffic(data: st.DataObject, count: int, pages: int, caching: bool):
    """Nothing is lost or doubled, and every sequence gets the tokens that it would get alone; ranks never touch each other's pages."""
    scheduler = make_ranks(count, pages=pages, page_size=2, length=16, budget=6, caching=caching)
    devices = [CheckingDevice(2, (None,), has_state=False) for _ in range(count)]
    alone: dict[str, Alone] = {}
    received: dict[str, list[int]] = {}
    open_requests: set[str] = set()
    launched = None
    for _ in range(data.draw(st.integers(1, 40))):
        for _ in range(data.draw(st.integers(0, 3)) if len(alone) < 20 else 0):
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            params = SamplingParams(max_tokens=data.draw(st.integers(1, 9)))
            request = Request(
                id=f"r{len(alone)}", prompt_token_ids=tuple(prompt), params=params, eos_token_ids=frozenset({3})
            )
            scheduler.add(request)
            alone[request.id], received[request.id] = Alone.of(request, len(alone), 16), []
            open_requests.add(request.id)
        if open_requests and data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(sorted(open_requests)))
            assert scheduler.abort(gone).request_id == gone
            open_requests.remove(gone)
        previous, launched = launched, None
        if (output := scheduler.schedule()) is not None:
            results = [
                result
                for device, part in zip(devices, output.by_rank, strict=True)
                for result in (device.run([row_of(item, alone) for item in part]) if part else ())
            ]
            launched = output, results
        scheduler.check()
        if previous is not None:
            for one in scheduler.commit(*previous):
                assert one.request_id in open_requests
                received[one.request_id] += one.token_ids
                if one.finish_reason is not None:
                    open_requests.remove(one.request_id)
                    expected = alone[one.request_id]
                    assert expected.tokens[-len(received[one.request_id]) :] == received[one.request_id]
                    assert one.finish_reason is expected.reason
        scheduler.check()
        assert (
            len(scheduler.waiting) + len(scheduler.running)
            == len(open_requests)
            == len([*scheduler.waiting, *scheduler.running])
        )


def row_of(item, alone: dict[str, Alone]) -> Row:
    sequence = item.sequence
    return Row(
        alone[sequence.request.id],
        sequence,
        item.start,
        item.start + item.length,
        item.samples,
        sequence.slot,
        [list(pages) for pages in sequence.pages],
        list(sequence.tokens),
    )
