"""Rows of recurrent state around launches that are not committed yet: none leaks, and what is kept is what is asked for again."""

from scheduler_driver import add

from tpu_serve.request import FinishReason
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.snapshots import Snapshots
from tpu_serve.scheduler.step import SampledToken


def make(num_snapshots=4, pages=64, seqs=4, budget=16, length=64):
    return Scheduler(
        Cache([PagePool(1 + pages, 4)], Snapshots(num_snapshots)),
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length,
    )  # fmt: skip


def commit(scheduler, output, token=7):
    return scheduler.commit(output, [SampledToken(token) if item.samples else None for item in output.scheduled])


def drain(scheduler):
    launched = []
    while scheduler.has_work:
        output = scheduler.schedule()
        launched += [output] if output else []
        commit(scheduler, launched.pop(0))
        scheduler.check()


def snapshot_in_flight(scheduler):
    """A decode whose last token of a page is in flight is launched: two steps that are not committed."""
    add(scheduler, "a", 6)
    first = scheduler.schedule()  # the last page of the prompt, tokens 0 to 3
    commit(scheduler, first)
    launched = [scheduler.schedule(), scheduler.schedule()]  # 4 and 5; then 6
    commit(scheduler, launched.pop(0))
    launched.append(scheduler.schedule())  # 7, sampled by the step before: its page's content is not known
    assert launched[-1].scheduled[0].snapshot >= 0
    return launched


def test_abort_while_the_content_of_a_snapshot_is_not_known():
    scheduler = make()
    launched = snapshot_in_flight(scheduler)
    scheduler.abort("a")
    for output in launched:
        commit(scheduler, output)
    scheduler.check()


def test_bad_logits_while_the_content_of_a_snapshot_is_not_known():
    scheduler = make()
    first, second = snapshot_in_flight(scheduler)
    (output,) = commit(scheduler, first, token=-1)
    assert output.finish_reason is FinishReason.ERROR
    commit(scheduler, second)
    scheduler.check()


def cached_of(scheduler, name, prompt):
    add(scheduler, name, prompt, max_tokens=1)
    sequence = scheduler.waiting[-1]
    drain(scheduler)
    return sequence.num_cached


def test_an_equal_prompt_goes_on_from_its_last_page():
    scheduler = make()
    prompt = list(range(100, 114))
    assert [cached_of(scheduler, name, prompt) for name in "ab"] == [0, 12]


def test_the_third_prompt_goes_on_from_where_the_first_two_part():
    scheduler = make()
    prefix = list(range(100, 106))
    assert [
        cached_of(scheduler, n, [*prefix, *range(o, o + 9)]) for n, o in zip("abc", (200, 300, 400), strict=False)
    ] == [0, 0, 4]


def test_a_long_answer_keeps_only_its_newest_row():
    scheduler = make(
        num_snapshots=5
    )  # beside the two others: the long prompt's, the newest of its answer, and one on the way
    prompts = [list(range(o, o + 6)) for o in (100, 200)]
    for name, prompt in zip("ab", prompts, strict=False):
        cached_of(scheduler, name, prompt)
    add(scheduler, "long", 6, max_tokens=40)
    drain(scheduler)
    assert [cached_of(scheduler, name, prompt) for name, prompt in zip("cd", prompts, strict=False)] == [4, 4]


def test_the_row_not_used_for_longest_gives_way():
    scheduler = make(num_snapshots=2)
    first, second, third = (list(range(o, o + 6)) for o in (100, 200, 300))
    for name, prompt in zip("abcd", (first, second, first, third), strict=False):
        cached_of(scheduler, name, prompt)
    assert cached_of(scheduler, "e", first) == 4


def test_a_chunk_that_the_budget_cuts_ends_at_the_end_of_a_page():
    for num_snapshots, length in ((4, 8), (0, 10)):  # without snapshots there is nothing to gain
        scheduler = make(num_snapshots=num_snapshots, budget=10)
        add(scheduler, "a", 30)
        (item,) = scheduler.schedule().scheduled
        assert (item.length, item.snapshot >= 0) == (length, num_snapshots > 0)


def test_flushing_the_cache_frees_every_row():
    scheduler = make()
    cached_of(scheduler, "a", list(range(100, 114)))
    assert scheduler.cache.reset()
    assert [scheduler.cache.snapshots.take(object(), 4, False) >= 0 for _ in range(5)] == [True] * 4 + [False]
