"""Who goes first, who loses pages, and that nobody waits for ever. Random traffic is in `test_scheduler_machine.py`."""

from __future__ import annotations

import random

import pytest
from scheduler_driver import EOS, add, commit, make, names, schedule, step
from watcher import Watcher

from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken


def finish(scheduler: Scheduler, most_steps: int = 1000) -> str:
    """Runs to the end with one step under way; the names in the order in which they finished."""
    finished, launched = "", None
    for _ in range(most_steps):
        if not scheduler.has_work:
            break
        output = scheduler.schedule()
        scheduler.check()
        if launched is not None:
            outputs = commit(scheduler, launched)
            finished += "".join(name for name, item in outputs.items() if item.finish_reason)
        launched = output
    assert not scheduler.has_work, "requests are stuck"
    if launched is not None:
        commit(scheduler, launched)
    assert scheduler.cache.usage == 0
    return finished


def test_lower_priorities_go_first_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = make(seqs=1)
    for name, priority in zip("abcde", (0, 5, -1, 0, 5), strict=True):
        add(scheduler, name, 2, max_tokens=2, priority=priority)
    assert names(scheduler.waiting) == "cadbe"
    assert finish(scheduler) == "cadbe"


def test_a_late_request_goes_before_those_that_wait_but_takes_nothing_from_one_that_runs() -> None:
    scheduler = make(seqs=1)
    add(scheduler, "a", 2, max_tokens=4, priority=3)
    add(scheduler, "b", 2, max_tokens=1, priority=3)
    step(scheduler)
    add(scheduler, "c", 2, max_tokens=1, priority=-7)
    assert names(scheduler.waiting) == "cb"
    assert finish(scheduler) == "acb"
    assert scheduler.stats.num_preemptions == 0


def test_the_lowest_priority_loses_its_pages_first_and_of_these_the_youngest() -> None:
    scheduler = make(pages=6)
    add(scheduler, "a", 4, priority=1)
    add(scheduler, "b", 4, priority=2)
    add(scheduler, "c", 4, priority=2)
    add(scheduler, "d", 4, priority=0)
    step(scheduler)
    assert names(scheduler.running) == "dabc"
    lost = []
    for _ in range(6):
        output = schedule(scheduler)
        lost.append(names(output.preempted))
        commit(scheduler, output)
    assert "".join(lost) == "cb"
    assert names(scheduler.waiting) == "bc"


def test_urgent_requests_overtake_preempted_ones_and_everybody_finishes() -> None:
    scheduler = make(pages=4, length=12)
    for name in "abcd":
        add(scheduler, name, 4, max_tokens=8, priority=5)
    for _ in range(3):
        step(scheduler)
    for name in "wxyz":
        add(scheduler, name, 4, max_tokens=8, priority=0)
    order = finish(scheduler)
    assert sorted(order) == list("abcdwxyz")
    assert [name for name in order if name in "wxyz"] == list("wxyz")
    assert order.index("z") < order.index("b"), "only what ran already may finish before"
    assert scheduler.stats.num_preemptions > 0


def test_prompt_tokens_that_wait_are_counted() -> None:
    scheduler = make(seqs=1)
    add(scheduler, "a", 5)
    add(scheduler, "b", 3)
    assert scheduler.num_waiting_tokens == 8
    step(scheduler)
    assert scheduler.num_waiting_tokens == 3
    scheduler.abort("b")
    assert scheduler.num_waiting_tokens == 0
    add(scheduler, "c", 3)
    scheduler.reset()
    assert scheduler.num_waiting_tokens == 0


def test_a_cache_that_cannot_hold_the_longest_request_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="8 pages of 16 tokens cannot hold max_model_len 256"):
        make(pages=8, page_size=16, length=256)


@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_while_nothing_runs_whatever_comes_and_goes(seed: int) -> None:
    """Many requests of every kind, three steps of a pipeline, random endings and aborts."""
    chance = random.Random(seed)
    scheduler = make(pages=12, page_size=2, seqs=4, budget=8, length=20)
    launched, living, num_added, num_idle = [], [], 0, 0
    for _ in range(1500):
        if chance.random() < 0.3 and len(living) < 12:
            name = f"{chance.choice('abc')}{num_added}"
            watcher = Watcher(True, chance.choice([0, 3])) if chance.random() < 0.3 else None
            priority = chance.choice([0, 0, 1, -2])
            add(scheduler, name, chance.randint(1, 15), chance.randint(1, 9), priority=priority, constraint=watcher)
            living.append(name)
            num_added += 1
        if chance.random() < 0.1 and living:
            scheduler.abort(living.pop(chance.randrange(len(living))))
        output = scheduler.schedule()
        if output is not None:
            launched.append(output)
        num_idle = 0 if output is not None or launched else num_idle + 1
        assert not (num_idle and scheduler.has_work), "they wait, and nothing runs"
        while len(launched) > chance.choice([0, 1, 2]):
            oldest = launched.pop(0)
            tokens = [
                SampledToken(chance.choice([EOS, 7, 7, 7, 7, 7])) if item.samples else None for item in oldest.scheduled
            ]
            for item in scheduler.commit(oldest, tokens):
                if item.finish_reason:
                    living.remove(item.request_id)
        scheduler.check()
    assert num_added > 200
    assert scheduler.stats.num_preemptions > 10
