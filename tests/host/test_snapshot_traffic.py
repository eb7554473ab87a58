"""Recurrent state beside long prompts: what others left is kept, and nobody is admitted only to be preempted."""

from scheduler_driver import add
from test_snapshot_rows import cached_of, drain, make


def test_a_long_prompt_leaves_the_rows_of_others():
    scheduler = make(num_snapshots=5, pages=200, length=300)
    prompts = [list(range(o, o + 6)) for o in (100, 200)]
    for name, prompt in zip("ab", prompts, strict=False):
        cached_of(scheduler, name, prompt)
    add(scheduler, "long", 250, max_tokens=1)
    drain(scheduler)
    assert [cached_of(scheduler, name, prompt) for name, prompt in zip("cd", prompts, strict=False)] == [4, 4]


def test_pages_that_a_prompt_still_needs_are_not_given_to_the_next():
    scheduler = make(pages=12, budget=48, length=48)
    prefix = list(range(100, 108))
    cached_of(scheduler, "x", [*prefix, 1])
    scheduler.cache.snapshots.reset()  # the pages are known, their state is not: the next chunk ends where they do
    add(scheduler, "a", [*prefix, *range(500, 536)], max_tokens=2)
    add(scheduler, "b", 30, max_tokens=2)
    drain(scheduler)
    assert scheduler.stats.num_preemptions == 0
