"""The step loop and its thread, over a scripted model."""

import dataclasses
import threading
import time

import pytest
from fakes import END, FakeRunner, fake_engine, letters, saying
from watcher import Watcher

from tpu_serve.engine.client import EngineClient, EngineDead
from tpu_serve.request import FinishReason, Request, SamplingParams


def request(name, prompt=b"abc", max_tokens=5, **values):
    return Request(
        id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **values),
        eos_token_ids=frozenset({END}),
    )


class Outbox:
    """Collects outputs per request and lets a test wait for one to end."""

    def __init__(self):
        self.outputs, self.failures = {}, []
        self._changed = threading.Condition()

    def __call__(self, outputs):
        with self._changed:
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self._changed.notify_all()

    def tokens(self, name):
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def wait_for(self, condition):
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout=10)

    def end_of(self, name):
        self.wait_for(lambda box: name in box.outputs and box.outputs[name][-1].finish_reason is not None)
        return self.outputs[name][-1]


@pytest.fixture
def start():
    clients = []

    def start(runner=None, **values):
        outbox = Outbox()
        client = EngineClient(fake_engine(runner=runner, **values).core, outbox, outbox.failures.append)
        clients.append(client)
        return client, outbox

    yield start
    for client in clients:
        client.close()
        client.core.scheduler.check()


def test_the_next_step_is_launched_before_the_previous_one_is_collected():
    events = []

    class Spy(FakeRunner):
        def launch(self, output):
            events.append(f"launch {output.step_id}")
            return super().launch(output)

        def collect(self, ticket):
            events.append(f"collect {ticket.output.step_id}")
            return super().collect(ticket)

    core = fake_engine(runner=Spy()).core
    core.add(request("a", max_tokens=3))
    while core.has_work:
        core.step()
    assert events == ["launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "collect 3"]
    assert core.num_steps == 3


def test_a_sequence_that_needs_its_last_token_runs_at_full_speed():
    """The previous step is committed first, rather than passing the sequence over in every other step."""
    events, watcher = [], Watcher(True)

    class Spy(FakeRunner):
        def launch(self, output):
            known = [item.sequence.tokens[3:] for item in output.scheduled]
            events.append(f"launch {[len(tokens) for tokens in known]}")
            return super().launch(output)

        def collect(self, ticket):
            events.append("collect")
            return super().collect(ticket)

    core = fake_engine(runner=Spy()).core
    core.add(dataclasses.replace(request("a", max_tokens=3), constraint=watcher))
    core.add(request("b", prompt=b"bcd", max_tokens=6))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert events[:6] == ["launch [0, 0]", "collect", "launch [1, 1]", "collect", "launch [2, 2]", "launch [2]"]
    assert events[6:] == ["collect", "launch [3]", "collect", "launch [4]", "collect", "collect"]
    assert core.num_steps == 6
    for name, prompt, count in (("a", b"abc", 3), ("b", b"bcd", 6)):
        tokens = [token for output in outputs if output.request_id == name for token in output.token_ids]
        assert tokens == [letters(request(name, prompt=prompt), i) for i in range(count)]


def test_a_request_ends_with_its_tokens(start):
    client, outbox = start(FakeRunner(saying("hi")))
    client.submit(request("a", max_tokens=9))
    assert outbox.end_of("a").finish_reason is FinishReason.STOP
    assert outbox.tokens("a") == [*b"hi", END]


def test_many_threads_may_submit(start):
    client, outbox = start()
    names = [f"r{i}" for i in range(60)]

    def submit(part):
        for name in part:
            client.submit(request(name, prompt=name.encode()))

    threads = [threading.Thread(target=submit, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for name in names:
        assert outbox.end_of(name).finish_reason is FinishReason.LENGTH
        assert outbox.tokens(name) == [letters(request(name, prompt=name.encode()), i) for i in range(5)]
    for thread in threads:
        thread.join()


def test_abort_frees_and_stays_silent(start):
    client, outbox = start(FakeRunner(seconds=0.002))
    client.submit(request("a", max_tokens=200))
    outbox.wait_for(lambda box: len(box.tokens("a")) >= 2)
    client.abort("a")
    client.submit(request("b"))
    outbox.end_of("b")
    assert all(output.finish_reason is None for output in outbox.outputs["a"])
    assert client.num_running == client.num_waiting == 0
    client.abort("a")
    client.abort("never heard of")


def test_one_bad_request_ends_only_itself(start):
    client, outbox = start()
    client.submit(request("too long", prompt=b"x" * 300))
    client.submit(request("fine"))
    ended = outbox.end_of("too long")
    assert ended.finish_reason is FinishReason.ERROR
    assert "does not fit" in ended.error
    assert outbox.end_of("fine").finish_reason is FinishReason.LENGTH
    assert client.is_alive


def test_a_failing_step_ends_everything_with_an_error(start, caplog):
    runner = FakeRunner(seconds=0.002)
    client, outbox = start(runner)
    for name in ("a", "b"):
        client.submit(request(name, max_tokens=200))
    outbox.wait_for(lambda box: box.tokens("b"))
    runner.failure = RuntimeError("secret detail")
    for name in ("a", "b"):
        ended = outbox.end_of(name)
        assert ended.finish_reason is FinishReason.ERROR
        assert ended.error == "the engine failed: RuntimeError"
    outbox.wait_for(lambda box: not client.is_alive)
    with pytest.raises(EngineDead, match="the engine failed"):
        client.submit(request("c"))
    deadline = time.monotonic() + 5
    while not outbox.failures and time.monotonic() < deadline:
        time.sleep(0.01)
    assert outbox.failures == ["the engine failed: RuntimeError"]
    assert "secret detail" in caplog.text, "the log has the whole story"


def test_the_prefix_cache_is_forgotten_between_two_steps(start):
    client, outbox = start(FakeRunner(seconds=0.002))
    assert client.reset_prefix_cache().result(5)
    client.submit(request("a", prompt=b"x" * 64, max_tokens=2))
    outbox.end_of("a")
    client.submit(request("b", prompt=b"x" * 64, max_tokens=100))
    outbox.wait_for(lambda box: box.tokens("b"))
    assert outbox.outputs["b"][0].num_cached_tokens == 56
    assert not client.reset_prefix_cache().result(5), "b holds some"
    client.abort("b")
    outbox.wait_for(lambda box: not client.num_running)
    assert client.reset_prefix_cache().result(5)
    client.submit(request("c", prompt=b"x" * 64, max_tokens=1))
    assert outbox.end_of("c").num_cached_tokens == 0


def test_nobody_waits_for_an_engine_that_is_gone(start):
    runner = FakeRunner()
    client, outbox = start(runner)
    runner.hangs.set()
    client.submit(request("a"))
    outbox.wait_for(lambda box: client.num_running)
    waiting = client.reset_prefix_cache()
    closing = threading.Thread(target=client.close)
    closing.start()
    runner.hangs.clear()
    closing.join()
    with pytest.raises(EngineDead, match="closed"):
        waiting.result(5)
    with pytest.raises(EngineDead, match="closed"):
        client.reset_prefix_cache()


def test_a_request_that_breaks_the_engine_takes_those_behind_it_along(start):
    """A defect while requests are taken in: everybody hears of it, the ones not looked at yet too."""

    class Broken(Watcher):
        def copy(self):
            raise KeyError("a defect")

    runner = FakeRunner()
    client, outbox = start(runner)
    runner.hangs.set()
    client.submit(request("a"))
    outbox.wait_for(lambda box: client.num_running)
    client.submit(dataclasses.replace(request("b"), constraint=Broken(True)))
    client.submit(request("c"))
    assert (client.num_waiting, client.num_waiting_tokens) == (2, 6)
    runner.hangs.clear()
    for name in "abc":
        assert outbox.end_of(name).finish_reason is FinishReason.ERROR


def test_close_ends_what_is_left(start):
    client, outbox = start(FakeRunner(seconds=0.005))
    client.submit(request("a", max_tokens=200))
    outbox.wait_for(lambda box: box.tokens("a"))
    client.close()
    assert outbox.outputs["a"][-1].finish_reason is FinishReason.ABORT
    assert outbox.failures == []
    with pytest.raises(EngineDead, match="closed"):
        client.submit(request("b"))


def test_an_idle_engine_does_not_spin(start):
    runner = FakeRunner()
    client, outbox = start(runner)
    client.submit(request("a"))
    outbox.end_of("a")
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1, "processor time, not a deadline: waiting costs none"
