"""The engine as asyncio code sees it: start a generation, iterate over its deltas, close it to abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from tpu_serve.engine.choice import Choice, ChoiceDelta
from tpu_serve.engine.client import EngineClient, EngineDead, RequestFailed
from tpu_serve.engine.engine import Engine
from tpu_serve.request import FinishReason, InvalidRequest, Request, SamplingParams, TokenOutput


class Observer(Protocol):
    """Is told what happens to choices, for metrics and logs. Times are seconds."""

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None: ...

    def next_token(self, choice: Choice, num_tokens: int, since_previous: float) -> None: ...

    def finished(self, choice: Choice, reason: FinishReason, since_arrival: float) -> None: ...


class Generation:
    """The answer to one prompt, `n` choices side by side: an asynchronous iterator of `ChoiceDelta`.

    Iteration ends after every choice has finished. `close` (also called when iteration is cancelled through `async with`) aborts what runs.

    Attributes:
      id: request id.
      num_prompt_tokens: length of the prompt.
      choices: the choices in order of index.
    """

    def __init__(self, frontend: Frontend, choices: list[Choice]):
        self._frontend, self.choices = frontend, choices
        self.id = choices[0].request.id
        self.num_prompt_tokens = len(choices[0].request.prompt_token_ids)
        self._deltas: asyncio.Queue[ChoiceDelta] = asyncio.Queue()
        self._num_open = len(choices)

    @property
    def num_cached_tokens(self) -> int:
        return self.choices[0].num_cached_tokens

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        return self

    async def __anext__(self) -> ChoiceDelta:
        """The next delta.

        Raises:
          RequestFailed: this request cannot be finished.
          EngineDead: the engine failed.
        """
        if not self._num_open:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        if delta.finish_reason is FinishReason.ERROR:
            self.close()
            kind = RequestFailed if self._frontend.client.is_alive else EngineDead
            raise kind(delta.error or "the engine failed")
        self._num_open -= delta.finish_reason is not None
        return delta

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the choices that still run; harmless when there are none."""
        self._num_open = 0
        for choice in self.choices:
            self._frontend.abort(choice)


class Frontend:
    """Joins an engine to the running event loop. Call everything from that loop's thread.

    Args:
      engine: a built engine, used by nobody else.
      observer: is told about tokens and endings.
      on_failure: called in the loop when the engine has failed.

    Attributes:
      engine: with its tokenizer and model info.
      client: how the engine thread is reached.
    """

    def __init__(
        self, engine: Engine, observer: Observer | None = None, on_failure: Callable[[str], None] = lambda _: None
    ):
        self.engine, self._observer = engine, observer
        self._live: dict[str, tuple[Generation, Choice, float]] = {}
        self._last_token: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        self.client = EngineClient(
            engine.core,
            lambda outputs: self._post(loop, self._dispatch, outputs),
            lambda why: self._post(loop, on_failure, why),
        )

    @staticmethod
    def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, *args)

    @property
    def num_live(self) -> int:
        """Choices that are waiting or running."""
        return len(self._live)

    def start(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        param: str = "prompt",
    ) -> Generation:
        """Starts generating at once.

        Args:
          param: name of the field that held the prompt, for messages.

        Raises:
          InvalidRequest: the request does not fit the model, its id is in use (`param` is "request_id"), or the queue is full (503).
          EngineDead: the engine has failed.
        """
        requests = self.engine.intake.requests(request_id, prompt_token_ids, params, cache_salt=cache_salt, param=param)
        if any(request.id in self._live for request in requests):
            raise InvalidRequest(
                "request_id", f"A request with id {request_id!r} is under way.", "duplicate_request_id"
            )
        limit = self.engine.info.max_num_queued
        if self.client.num_waiting + len(requests) > limit:
            raise InvalidRequest(
                None,
                f"The server is busy: {self.client.num_waiting} requests are waiting, {len(requests)} more were asked for, and the limit is "
                f"{limit} (--max-num-queued-reqs).",
                "queue_full",
                503,
            )
        return self._start(requests)

    def _start(self, requests: list[Request]) -> Generation:
        generation = Generation(self, [Choice(request, self.engine.tokenizer) for request in requests])
        for choice in generation.choices:
            # Submit first: a dead engine refuses, and leaves no entry. Outputs reach this loop later than the next line.
            self.client.submit(choice.request)
            self._live[choice.request.id] = (generation, choice, time.monotonic())
        return generation

    def abort(self, choice: Choice) -> None:
        """Aborts one choice; harmless when it has finished."""
        if choice.request.id in self._live and self._live[choice.request.id][1] is choice:
            self.client.abort(choice.request.id)
            self._end(choice, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Aborts every choice; the last delta of each says so. Does not wait for the engine, which may be stuck."""
        for generation, choice, _ in list(self._live.values()):
            self.abort(choice)
            generation._deltas.put_nowait(ChoiceDelta(index=choice.request.choice, finish_reason=FinishReason.ABORT))

    def close(self) -> None:
        """Stops the engine thread. Blocks for the step under way."""
        self.client.close()

    def _dispatch(self, outputs: list[TokenOutput]) -> None:
        now = time.monotonic()
        for output in outputs:
            if output.request_id not in self._live:
                continue  # aborted here while the step ran
            generation, choice, arrival = self._live[output.request_id]
            delta = choice.feed(output)
            if self._observer is not None and delta.token_ids:
                previous = self._last_token.get(output.request_id)
                if previous is None:
                    self._observer.first_token(choice, len(delta.token_ids), now - arrival)
                else:
                    self._observer.next_token(choice, len(delta.token_ids), now - previous)
                self._last_token[output.request_id] = now
            if delta.finish_reason is not None:
                if output.finish_reason is None:  # a stop string, which the engine knows nothing of
                    self.client.abort(output.request_id, FinishReason.STOP)
                self._end(choice, delta.finish_reason)
            generation._deltas.put_nowait(delta)

    def _end(self, choice: Choice, reason: FinishReason) -> None:
        _, _, arrival = self._live.pop(choice.request.id)
        self._last_token.pop(choice.request.id, None)
        choice.finish_reason = reason
        if self._observer is not None:
            self._observer.finished(choice, reason, time.monotonic() - arrival)
