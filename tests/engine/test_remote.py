"""The ends of the connection between a server's process and its engine's, without the other process."""

import asyncio
import contextlib
import pickle
import socket
import threading
import time

import pytest
from fakes import asynchronous, fake_engine

from tpu_serve.config import EngineConfig
from tpu_serve.engine.channel import Frames, frame, messages_of
from tpu_serve.engine.client import EngineDead
from tpu_serve.engine.messages import Add, Answer, Call, Facts, Failed, Ready, Turn, encode
from tpu_serve.engine.reading import Reading, cache_facts
from tpu_serve.engine.remote import RemoteEngine
from tpu_serve.engine.worker import Worker
from tpu_serve.request import FinishReason, Request, SamplingParams

REQUEST = Request(id="a", prompt_token_ids=(65, 66), params=SamplingParams(max_tokens=9))


class Process:
    """One that has ended when somebody asks."""

    def end(self, seconds):
        return 0

    def last_words(self):
        return "it ended"


@contextlib.contextmanager
def connected():
    """An engine whose process the test plays, by the other end of its socket, and what it had said before anybody was connected."""
    engine = fake_engine()
    facts = Facts(EngineConfig(), engine.intake, engine.tokenizer, {}, cache_facts(engine.core.scheduler))
    ours, theirs = socket.socketpair()
    frames = Frames()
    with ours, theirs:
        yield RemoteEngine(Process(), ours, frames, Ready(pickle.dumps(facts), Reading(), {})), theirs, frames


def wait_for(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def test_what_is_read_beyond_a_message_is_not_lost():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        data = b"".join(frame(message) for message in (b"first", b"", b"x" * 1000))
        theirs.sendall(data[:-10])
        frames = Frames()
        assert next(messages_of(ours, frames)) == b"first"
        assert list(frames.feed(b"")) == [b""]
        assert list(frames.feed(data[-10:])) == [b"x" * 1000]


@asynchronous
async def test_what_the_engine_said_before_it_was_connected():
    with connected() as (engine, _, frames):
        assert next(frames.feed(frame(b"ready") + frame(encode(Failed("the device is on fire"))))) == b"ready"
        failures = []
        client = engine.connect(lambda outputs: None, failures.append)
        await until(lambda: failures)
        assert failures == [client.failure] == ["the device is on fire"]
        client.close()


@asynchronous
async def test_an_answer_may_come_after_the_end_of_the_engine():
    with connected() as (engine, theirs, _):
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        client = engine.connect(lambda outputs: None)
        done = client.call("describe")
        turn = Turn([], Reading(num_steps=7), [], [], None)
        theirs.sendall(b"".join(frame(encode(one)) for one in (Failed("fire"), Answer(1, {}, None), turn)))
        await until(lambda: engine.reading().num_steps == 7)
        with pytest.raises(EngineDead, match="fire"):
            done.result(0)
        client.close()
        await asyncio.sleep(0)
        assert not problems


def test_calls_of_an_engine_that_dies_are_answered_by_its_end():
    sent, is_stepping, is_called = [], threading.Event(), threading.Event()
    worker, engine = Worker(sent.append), fake_engine()

    def collect(ticket):
        is_stepping.set()
        assert is_called.wait(10)
        raise RuntimeError("the device is on fire")

    engine.core.runner.collect = collect
    worker._build = lambda start: engine
    worker._load(None)
    worker.take(Add(REQUEST, None))
    assert is_stepping.wait(10)
    worker.take(Call(1, "reset_prefix_cache", []))
    is_called.set()
    wait_for(lambda: any(isinstance(message, Failed) for message in sent))
    worker.take(Call(2, "reset_prefix_cache", []))
    assert not [message for message in sent if isinstance(message, Answer)]
    worker.close()


@asynchronous
async def test_a_constraint_that_cannot_be_made_ends_its_request_and_changes_no_number():
    sent = []
    worker, engine = Worker(sent.append), fake_engine()
    worker._build = lambda start: engine
    worker._load(None)
    worker.take(Add(REQUEST, b"not a constraint"))
    await until(lambda: len(sent) == 2)
    worker.close()
    with connected() as (remote, theirs, _):
        outputs = []
        client = remote.connect(outputs.extend)
        client.submit(REQUEST)
        theirs.sendall(frame(encode(Turn([], Reading(num_steps=7), [], [], None))) + frame(encode(sent[1])))
        await until(lambda: outputs)
        assert (outputs[0].request_id, outputs[0].finish_reason) == ("a", FinishReason.ERROR)
        assert "the constraint could not be made" in outputs[0].error
        assert remote.reading().num_steps == 7, "the engine's turns may have overtaken it"
        assert (client.num_waiting, client.num_waiting_tokens) == (0, 0)
        client.close()
