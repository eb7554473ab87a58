"""The engine as asyncio code sees it: limits of the queue, times, what the prefix cache forgets. Over a scripted model."""

import asyncio
import contextlib
import dataclasses

import pytest
from fakes import END, FakeRunner, asynchronous, fake_engine, letters, saying
from watcher import Watcher

from tpu_serve.engine.frontend import Frontend
from tpu_serve.request import FinishReason, InvalidRequest, SamplingParams

LONG = SamplingParams(max_tokens=100)


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.rejections, self.finishes = [], []

    def started(self, generation): ...
    def first_token(self, choice, num_tokens, since_arrival): ...
    def next_tokens(self, num_tokens, since_previous): ...
    def step(self, num_tokens): ...
    def answered(self, generation): ...

    def finished(self, choice, reason, since_arrival):
        self.finishes.append((choice.request.id, reason, choice.timing))

    def rejected(self, limit, num_choices):
        self.rejections.append((limit, num_choices))


async def fill(frontend):
    """Every place in the batch is taken, and the engine stands still: what comes next waits."""
    generations = [frontend.start(f"r{index}", [65] * 6, LONG) for index in range(8)]
    await until(lambda: frontend.client.num_running == 8)
    frontend.client.core.runner.hangs.set()
    return generations


@contextlib.asynccontextmanager
async def running(runner=None, **changes):
    engine, notes = fake_engine(runner=runner), Notes()
    info = dataclasses.replace(engine.info, **changes)
    engine = dataclasses.replace(engine, info=info)
    engine.intake.info = info
    frontend = Frontend(engine, notes)
    try:
        yield frontend, notes
    finally:
        engine.core.runner.hangs.clear()
        await asyncio.to_thread(frontend.close)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def text_of(generation):
    return "".join([delta.text async for delta in generation])


@asynchronous
async def test_prompt_tokens_in_the_queue_are_limited():
    async with running(FakeRunner(seconds=0.01), max_num_queued_tokens=50) as (frontend, notes):
        await fill(frontend)
        assert frontend.client.num_waiting == 0
        frontend.start("q1", [65] * 20, LONG)
        frontend.start("q2", [65] * 15, dataclasses.replace(LONG, n=2))
        assert frontend.client.num_waiting_tokens == 50
        with pytest.raises(
            InvalidRequest, match=r"1 more were brought, and the limit is 50 .--max-num-queued-tokens."
        ) as caught:
            frontend.start("q3", [65], LONG)
        assert (caught.value.status, caught.value.reason, caught.value.param) == (503, "queue_full", None)
        assert notes.rejections == [("max_num_queued_tokens", 1)]
        with pytest.raises(InvalidRequest, match="51 tokens, more than the 50") as caught:
            frontend.start("q4", [65] * 51, LONG)
        assert caught.value.status == 400


@asynchronous
async def test_several_choices_may_be_more_than_the_queue_takes_when_nobody_waits():
    async with running(max_num_queued_tokens=50) as (frontend, notes):
        params = SamplingParams(n=2, max_tokens=1)
        assert len(await text_of(frontend.start("a", [65] * 30, params))) == 2
        assert not notes.rejections


@asynchronous
async def test_requests_in_the_queue_are_limited():
    async with running(FakeRunner(seconds=0.01), max_num_queued=8) as (frontend, notes):
        await fill(frontend)
        frontend.start("q", [65], LONG)
        with pytest.raises(InvalidRequest, match="1 requests are waiting, 8 more were asked for, and the limit is 8 "):
            frontend.start("p", [65], dataclasses.replace(LONG, n=8))
        assert notes.rejections == [("max_num_queued_reqs", 8)]
        assert frontend.retry_after_seconds >= 1


@asynchronous
async def test_the_prefix_cache_can_be_forgotten():
    async with running() as (frontend, _):
        for expected in (0, 56):
            generation = frontend.start("a", [65] * 64, SamplingParams(max_tokens=2))
            await text_of(generation)
            assert generation.num_cached_tokens == expected
        await until(lambda: not frontend.client.num_running)
        assert await frontend.reset_prefix_cache()
        generation = frontend.start("a", [65] * 64, SamplingParams(max_tokens=2))
        await text_of(generation)
        assert generation.num_cached_tokens == 0


@asynchronous
async def test_priorities_and_constraints_reach_the_scheduler():
    runner = FakeRunner(saying("abcdef" * 9), seconds=0.01)
    async with running(runner, scheduling_policy="priority") as (frontend, _):
        await fill(frontend)
        runner.hangs.clear()
        params = SamplingParams(n=2, max_tokens=9)
        late, soon = (
            frontend.start(name, [66], params, priority=priority, constraint=Watcher(True, finishes=3))
            for name, priority in (("late", 2), ("soon", -1))
        )
        waiting = frontend.client.core.scheduler.waiting
        await until(lambda: len(waiting) == 4)
        assert [one.request.priority for one in waiting] == [-1, -1, 2, 2]
        assert [await text_of(soon), await text_of(late)] == ["aabbcc", "aabbcc"]


@asynchronous
async def test_an_id_used_again_gets_nothing_of_the_older_request():
    runner = FakeRunner(letters)
    async with running(runner) as (frontend, _):
        expected = await text_of(frontend.start("a", [66] * 9, SamplingParams(max_tokens=5)))
        older = frontend.start("a", [65] * 9, LONG)
        await anext(older)
        with pytest.raises(InvalidRequest, match="'a' is under way"):
            frontend.start("a", [66] * 9, LONG)
        runner.hangs.set()
        older.close()  # a step of it is under way
        again = frontend.start("a", [66] * 9, SamplingParams(max_tokens=5))
        older.close()
        assert frontend.num_live == 1
        runner.hangs.clear()
        assert await text_of(again) == expected


@asynchronous
async def test_every_ending_is_told_with_its_times():
    runner = FakeRunner(saying("one stop two"), seconds=0.002)
    async with running(runner) as (frontend, notes):
        await text_of(frontend.start("eos", [65] * 9, LONG))
        await text_of(frontend.start("string", [65] * 9, dataclasses.replace(LONG, stop=("stop",))))
        aborted = frontend.start("abort", [65] * 9, LONG)
        await anext(aborted)
        aborted.close()
    endings = {name: (reason, timing) for name, reason, timing in notes.finishes}
    assert {name: reason for name, (reason, _) in endings.items()} == {
        "eos": FinishReason.STOP,
        "string": FinishReason.STOP,
        "abort": FinishReason.ABORT,
    }
    for name, (_, timing) in endings.items():
        assert timing.arrival <= timing.admitted <= timing.first_token <= timing.last_token, name
        assert timing.num_prompt_computed == (9 if name == "eos" else 1)
    assert all(timing.last_token > timing.first_token for name, (_, timing) in endings.items() if name != "abort")


@asynchronous
async def test_shown_tokens_and_those_without_text():
    runner = FakeRunner(saying("a", END + 1, "b"))
    async with running(runner) as (frontend, _):
        assert await text_of(frontend.start("a", [65], LONG)) == "ab"
        assert await text_of(frontend.start("a", [65], LONG, shown_token_ids=[END + 1])) == "a<|im_start|>b"
        generation = frontend.start("a", [65], SamplingParams(max_tokens=9, detokenize=False))
        deltas = [delta async for delta in generation]
        assert "".join(delta.text for delta in deltas) == ""
        assert [token for delta in deltas for token in delta.token_ids] == [97, END + 1, 98, END]
        assert [delta.num_tokens for delta in deltas] == [1, 2, 3, 4]
