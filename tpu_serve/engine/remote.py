"""An engine in another process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pickle
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tpu_serve.config import EngineConfig
from tpu_serve.constraint.border import packed
from tpu_serve.engine.channel import PIECE, Frames, closed, frame
from tpu_serve.engine.client import EngineDead
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.engine.messages import (
    Abort,
    Add,
    Answer,
    Call,
    Facts,
    Failed,
    Ready,
    ToEngine,
    Turn,
    decode_from_engine,
    encode,
)
from tpu_serve.engine.operations import Operation, OperationFailed
from tpu_serve.engine.reading import CacheFacts, Reading, StepRecord
from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tpu_serve.engine.process import EngineProcess

logger = logging.getLogger(__name__)

CLOSING = 1.5
"""Seconds that the process gets to finish its step and end."""


class RemoteEngine:
    """A `ServedEngine` whose numbers are those of the last step that its process has told of."""

    def __init__(self, process: EngineProcess, connection: socket.socket, frames: Frames, ready: Ready):
        """Owns the socket. `frames` has what was read from it behind `ready`."""
        self._facts: Facts = pickle.loads(ready.facts)
        self._process, self._connection, self._frames = process, connection, frames
        self._reading, self._memory = ready.reading, ready.memory
        self._on_step: Callable[[StepRecord], None] = lambda step: None
        self._client: RemoteClient | None = None

    @property
    def config(self) -> EngineConfig:
        return self._facts.config

    @property
    def info(self) -> ModelInfo:
        return self._facts.intake.info

    @property
    def intake(self) -> Intake:
        return self._facts.intake

    @property
    def tokenizer(self) -> Tokenizer:
        return self._facts.tokenizer

    @property
    def moe_plans(self) -> Mapping[tuple[str, str], int]:
        return self._facts.moe_plans

    @property
    def cache(self) -> CacheFacts:
        return self._facts.cache

    @property
    def process(self) -> EngineProcess:
        return self._process

    def connect(
        self, on_outputs: Callable[[list[TokenOutput]], None], on_failure: Callable[[str], None] = lambda _: None
    ) -> RemoteClient:
        self._client = RemoteClient(self, self._connection, self._frames, on_outputs, on_failure)
        return self._client

    def reading(self) -> Reading:
        return self._reading

    def device_memory(self) -> Mapping[str, int]:
        return self._memory

    def follow_steps(self, on_step: Callable[[StepRecord], None]) -> None:
        self._on_step = on_step

    def operate(self, name: Operation, *arguments: Any) -> Future[Any]:
        assert self._client is not None
        return self._client.call(name, *arguments)

    def update(self, turn: Turn) -> None:
        """Takes the numbers of a turn."""
        if turn.reading is not None:
            self._reading = turn.reading
        if turn.memory is not None:
            self._memory = turn.memory
        for step in turn.steps:
            self._on_step(step)


class RemoteClient:
    """The `Client` of an engine in another process. Lives in the event loop that it is made in."""

    def __init__(
        self,
        engine: RemoteEngine,
        connection: socket.socket,
        frames: Frames,
        on_outputs: Callable[[list[TokenOutput]], None],
        on_failure: Callable[[str], None],
    ):
        self._engine, self._connection, self._on_outputs, self._on_failure = engine, connection, on_outputs, on_failure
        self.failure: str | None = None
        self._is_closing = self._is_detached = False
        self._frames = frames
        self._unsent = bytearray()
        self._live: set[str] = set()
        self._unseen: dict[str, int] = {}  # prompt tokens of requests that the engine has yet to count
        self._calls: dict[int, Future[Any]] = {}
        self._num_calls = 0
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)
        self._loop.call_soon(self._take_piece, b"")

    @property
    def is_alive(self) -> bool:
        return self.failure is None and not self._is_closing

    @property
    def num_running(self) -> int:
        return self._engine.reading().num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.reading().num_waiting + len(self._unseen)

    @property
    def num_waiting_tokens(self) -> int:
        return self._engine.reading().num_waiting_tokens + sum(self._unseen.values())

    def submit(self, request: Request) -> None:
        self._check()
        constraint = None if request.constraint is None else packed(request.constraint)
        # What only texts are made with stays here.
        params = dataclasses.replace(request.params, stop=(), bad_words=())
        self._send(Add(dataclasses.replace(request, params=params, constraint=None), constraint))
        self._live.add(request.id)
        self._unseen[request.id] = len(request.prompt_token_ids)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._live.discard(request_id)
        self._unseen.pop(request_id, None)
        self._send(Abort(request_id, reason))

    def reset_prefix_cache(self) -> Future[bool]:
        self._check()
        return self.call("reset_prefix_cache")

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """Asks the engine's process for something; see `Call`. The future may raise `EngineDead` and `OperationFailed`."""
        done: Future[Any] = Future()
        if self.is_alive:
            self._num_calls += 1
            self._calls[self._num_calls] = done
            self._send(Call(self._num_calls, name, list(arguments)))
        else:
            done.set_exception(EngineDead(self.failure or "the engine is closed"))
        return done

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):  # closed already
            self._connection.shutdown(socket.SHUT_WR)
        self._engine.process.end(CLOSING)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish)

    def _check(self) -> None:
        if not self.is_alive:
            raise EngineDead(self.failure or "the engine is closed")

    # ---- the connection ---------------------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if self._is_detached:
            return
        is_stuck = bool(self._unsent)
        self._unsent += frame(encode(message))
        if not is_stuck:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._connection, self._write)

    def _write(self) -> None:
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # its end comes to `_read`
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._connection)

    def _read(self) -> None:
        try:
            piece = self._connection.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._detach()
            if not self._is_closing:
                self._fail(self._engine.process.last_words())
            return
        self._take_piece(piece)

    def _take_piece(self, piece: bytes) -> None:
        for data in self._frames.feed(piece):
            match decode_from_engine(data):
                case Turn() as turn:
                    self._take(turn)
                case Answer(number, result, error):
                    self._answer(number, result, error)
                case Failed(why):
                    self._fail(why)

    def _take(self, turn: Turn) -> None:
        for request_id in turn.taken:
            self._unseen.pop(request_id, None)
        self._engine.update(turn)
        if turn.outputs:
            self._live.difference_update(output.request_id for output in turn.outputs if output.finish_reason)
            self._on_outputs(turn.outputs)

    def _answer(self, number: int, result: Any, error: str | None) -> None:
        done = self._calls.pop(number, None)  # it was ended with the engine otherwise
        if done is not None and done.set_running_or_notify_cancel():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(OperationFailed(error))

    def _fail(self, why: str) -> None:
        if self.failure is not None or self._is_closing:
            return
        self.failure = why
        self._end_all(FinishReason.ERROR, why)
        self._on_failure(why)

    def _end_all(self, reason: FinishReason, why: str | None) -> None:
        names, calls = sorted(self._live), list(self._calls.values())
        self._live.clear()
        self._unseen.clear()
        self._calls.clear()
        for done in calls:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineDead(why or "the engine is closed"))
        if names:
            self._on_outputs([TokenOutput(request_id=name, finish_reason=reason, error=why) for name in names])

    def _finish(self) -> None:
        """The end of `close`, in the loop."""
        self._detach()
        self._end_all(FinishReason.ABORT, None)

    def _detach(self) -> None:
        if not self._is_detached:
            self._is_detached = True
            self._unsent.clear()
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            closed(self._connection)
