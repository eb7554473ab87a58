"""An engine that costs nothing: it says known tokens, a step whenever the event loop has dealt with the one before."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.request import FinishReason, Request, Timing, TokenLogprobs, TokenOutput
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput
from tpu_serve.text.tokenizer import Tokenizer

NUM_PASSES = 4
"""Of the event loop, which streams need to send what one step brought them."""
GUARD = 60.0
"""Seconds after which a loop that does not turn is an error."""


class _NoRunner:
    """Nothing is ever launched."""

    compile_count = 0

    def launch(self, output: SchedulerOutput) -> Any:
        raise NotImplementedError

    def collect(self, ticket: Any) -> list[SampledToken | None]:
        raise NotImplementedError

    def reset(self) -> None: ...


class ScriptedCore(EngineCore):
    """Waits for `num_streams` requests, then gives each of them one token of the script a step, all of the same length.

    Args:
      loop: what serves the streams; its thread's CPU time is read after every step, once everything that the step caused has run.
      token_ids: the script.

    Attributes:
      cpu_seconds: readings of that clock, one per step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_streams: int, token_ids: Sequence[int]):
        super().__init__(
            Scheduler(
                Cache([PagePool(2, 8)]),
                max_num_seqs=num_streams,
                max_num_batched_tokens=num_streams,
                max_model_len=8,
            ),
            _NoRunner(),
        )
        self._loop, self._num_streams, self._token_ids = loop, num_streams, token_ids
        self._requests: list[Request] = []
        self._place = 0
        self._is_settled = threading.Event()
        self.cpu_seconds: list[float] = []

    @property
    def has_work(self) -> bool:
        return len(self._requests) == self._num_streams

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        self._requests = [request for request in self._requests if request.id != request_id]
        return None

    def step(self) -> list[TokenOutput]:
        """The next token of every stream, when the loop has sent the one before."""
        if not self.has_work:
            return []
        if self._place:
            self._settle()
        outputs = [self._output(request) for request in self._requests]
        self._place += 1
        if self._place == len(self._token_ids):
            self._requests = []
        return outputs

    def _output(self, request: Request) -> TokenOutput:
        token_id, count = self._token_ids[self._place], request.params.logprobs
        is_last, now = self._place + 1 == len(self._token_ids), time.monotonic()
        return TokenOutput(
            request_id=request.id,
            token_ids=(token_id,),
            logprobs=None if count is None else (_logprobs(token_id, count),),
            finish_reason=FinishReason.LENGTH if is_last else None,
            timing=None
            if self._place and not is_last
            else Timing(arrival=request.arrival, admitted=request.arrival, first_token=now, last_token=now),
        )

    def _settle(self) -> None:
        self._is_settled.clear()
        self._loop.call_soon_threadsafe(self._pass, NUM_PASSES)
        if not self._is_settled.wait(GUARD):
            raise RuntimeError(f"The event loop did not turn for {GUARD:g} seconds.")

    def _pass(self, num_left: int) -> None:
        if num_left:
            self._loop.call_soon(self._pass, num_left - 1)
            return
        self.cpu_seconds.append(time.thread_time())
        self._is_settled.set()


def scripted_engine(core: ScriptedCore, tokenizer: Tokenizer, num_streams: int) -> Engine:
    """An engine of that core for the server: any length, any number of requests, no end-of-sequence id."""
    info = ModelInfo(
        name="scripted",
        architecture="Scripted",
        max_model_len=1_000_000,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset(),
        max_num_queued=num_streams,
    )
    return Engine(EngineConfig(), info, Intake(info, tokenizer=tokenizer), core, tokenizer)


def script(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int) -> list[int]:
    """Exactly so many token ids, an equal share of each text, repeated or cut.

    Raises:
      ConfigError: there are fewer tokens than texts.
    """
    if num_tokens < len(texts):
        raise ConfigError(f"{num_tokens} tokens are not enough for the {len(texts)} parts of what is streamed.")
    found: list[int] = []
    for place, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        goal = num_tokens * (place + 1) // len(texts)
        while len(found) < goal:
            found += ids[: goal - len(found)]
    return found


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.25, tuple((max(0, token_id - step), -0.25 - step) for step in range(count)))
