"""The program of an engine's process: makes an engine, steps it, and ends when the process that started it has ended or says so.

The main thread reads what comes, so that it sees the end of the other process whatever else is under way. The engine has its thread as it
would in any process, loading has one before, and grammars are compiled in a third: none waits for another.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from tpu_serve.config import ConfigError
from tpu_serve.constraint.border import unpacked
from tpu_serve.constraint.compiler import GrammarCompiler
from tpu_serve.engine.channel import Frames, Outbox, messages_of
from tpu_serve.engine.client import EngineClient, EngineDead
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.messages import (
    Abort,
    Add,
    Answer,
    Call,
    Facts,
    Failed,
    FromEngine,
    Phase,
    Ready,
    Refused,
    Start,
    Turn,
    decode_to_engine,
    encode,
)
from tpu_serve.engine.reading import StepRecord
from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.runner import background

logger = logging.getLogger(__name__)

ENDING = 0.9
"""Seconds for the step under way when the process is to end."""
_BETWEEN_MEMORIES = 1.0
"""Seconds between two looks at the devices' memory while steps go on."""


def main(descriptor: int) -> None:
    """Runs an engine for the process at the other end of a socket."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a terminal, or whoever ends a group, sends them to the other process too
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    messages = messages_of(connection, Frames())
    first = next(messages, None)
    if first is None:
        return
    start: Start = pickle.loads(first)
    if start.prepare is not None:
        start.prepare()
    outbox = Outbox(connection)
    worker = Worker(lambda message: outbox.send(encode(message)))
    worker.load(start)
    for data in messages:
        worker.take(decode_to_engine(data))
    outbox.end()
    # Whatever hangs from here on.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, ENDING)
    worker.close()
    background.leave(0)  # an ordinary end waits for threads, or tears the interpreter down under them


class Worker:
    """One engine, from loading to its end, without a socket. `take` and `close` are called in one thread.

    Args:
      send: takes what is to be said, in any thread.
    """

    def __init__(self, send: Callable[[FromEngine], None]):
        self._send = send
        self._engine: Engine | None = None
        self._client: _Client | None = None
        self._constraints: _Constraints | None = None

    def load(self, start: Start) -> None:
        """Begins to make the engine, in a thread."""
        threading.Thread(target=self._load, args=(start,), name="loader", daemon=True).start()

    def take(self, message: Add | Abort | Call) -> None:
        """Does what is asked. Nothing is before the engine is ready."""
        assert self._engine is not None
        assert self._client is not None
        assert self._constraints is not None
        match message:
            case Add(request, None):
                self._client.try_submit(request)
            case Add(request, bytes() as constraint):
                self._constraints.begin(request, constraint)
            case Abort(request_id, reason):
                if not self._constraints.drop(request_id):
                    self._client.abort(request_id, reason)
            case Call(number, name, arguments):
                self._call(number, name, arguments)

    def close(self) -> None:
        """Ends the engine after the step under way."""
        if self._client is not None:
            self._client.close()

    def _load(self, start: Start) -> None:
        try:
            engine = self._build(start)
            facts = Facts(engine.config, engine.intake, engine.tokenizer, dict(engine.moe_plans), engine.cache)
            client = _Client(engine, self._send)
            self._constraints = _Constraints(engine, client)
            self._engine, self._client = engine, client
            self._send(Ready(pickle.dumps(facts), engine.reading(), _memory_of(engine)))
            self._constraints.warm_up()
        except ConfigError as error:
            self._send(Refused(str(error), True))
        except BaseException as error:
            logger.error("Loading failed", exc_info=error)
            self._send(Refused(f"{type(error).__name__}: {error}", False))

    def _build(self, start: Start) -> Engine:
        def on_phase(name: str, share: float) -> None:
            self._send(Phase(name, share))

        build = start.build
        if build is None:
            from tpu_serve.engine.build import build_engine  # imports jax, which takes seconds

            build = build_engine
        engine: Engine = build(start.config, on_phase)
        return engine

    def _call(self, number: int, name: Any, arguments: list[Any]) -> None:
        assert self._engine is not None
        assert self._client is not None
        try:
            done: Future[Any] = (
                self._client.reset_prefix_cache()
                if name == "reset_prefix_cache"
                else self._engine.operate(name, *arguments)
            )
        except EngineDead:  # its end is told, and answers all calls
            return
        done.add_done_callback(partial(self._answer, number, name))

    def _answer(self, number: int, name: str, done: Future[Any]) -> None:
        error = done.exception()
        if isinstance(error, EngineDead):
            return
        if error is not None:
            logger.error("%s failed", name, exc_info=error)
        self._send(Answer(number, None if error else done.result(), None if error is None else str(error)))


class _Client(EngineClient):
    """Sends a message for each turn of the step loop."""

    def __init__(self, engine: Engine, send: Callable[[FromEngine], None]):
        self._engine, self._send = engine, send
        self._outputs: list[TokenOutput] = []
        self._taken: list[str] = []
        self._steps: list[StepRecord] = []
        self._last_memory = 0.0
        engine.follow_steps(self._steps.append)
        super().__init__(engine.core, self._outputs.extend, self._on_failure_of_engine)

    def try_submit(self, request: Request) -> None:
        """As `submit`; a dead engine has told its end already."""
        try:
            self.submit(request)
        except EngineDead:
            logger.debug("%s came after the end of the engine", request.id)

    def refuse(self, request_id: str, error: str) -> None:
        """Ends a request that was never submitted. Any thread may call it."""
        output = TokenOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)
        self._send(Turn([output], None, [request_id], [], None))

    def _add(self, request: Request) -> None:
        self._taken.append(request.id)
        super()._add(request)

    def _end_turn(self) -> None:
        now, memory = time.monotonic(), None
        if now - self._last_memory >= _BETWEEN_MEMORIES or not self.core.has_work:
            self._last_memory, memory = now, _memory_of(self._engine)
        self._send(Turn(self._outputs, self._engine.reading(), self._taken, self._steps, memory))
        self._outputs.clear()
        self._taken.clear()
        self._steps.clear()

    def _on_failure_of_engine(self, why: str) -> None:
        self._send(Failed(why))  # which ends all requests; their outputs need not be sent


class _Constraints:
    """Makes the constraints of requests that came from the other process, in a thread; a request is submitted when it has its own."""

    def __init__(self, engine: Engine, client: _Client):
        self._client = client
        self._grammars = GrammarCompiler(engine.tokenizer, engine.info.vocab_size, engine.info.eos_token_ids)
        self._threads = ThreadPoolExecutor(1, "constraint")
        self._waiting: dict[str, object] = {}
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Has what all grammars need made before the first one comes."""
        self._threads.submit(self._grammars.recompile, 'start: "a"')

    def begin(self, request: Request, constraint: bytes) -> None:
        with self._lock:
            mark = self._waiting[request.id] = object()
        self._threads.submit(self._make, request, constraint, mark)

    def drop(self, request_id: str) -> bool:
        """Whether the request had not been submitted, and will not be."""
        with self._lock:
            return self._waiting.pop(request_id, None) is not None

    def _make(self, request: Request, data: bytes, mark: object) -> None:
        error = None
        try:
            request = dataclasses.replace(request, constraint=unpacked(data, self._grammars.recompile))
        except Exception as failure:
            logger.exception("A constraint could not be made")
            error = f"the constraint could not be made: {failure}"
        with self._lock:
            if self._waiting.get(request.id) is not mark:
                return
            del self._waiting[request.id]
            if error is None:
                self._client.try_submit(request)
            else:
                self._client.refuse(request.id, error)


def _memory_of(engine: Engine) -> dict[str, int]:
    return {kind: int(size) for kind, size in engine.device_memory().items()}
