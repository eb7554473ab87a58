"""The engine as asyncio code sees it: start a generation, iterate over its deltas, close it to abort."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from tpu_serve.engine.admission import AdmissionRate
from tpu_serve.engine.choice import Choice, ChoiceDelta
from tpu_serve.engine.client import EngineClient, EngineDead, RequestFailed
from tpu_serve.engine.engine import Engine
from tpu_serve.request import Constraint, FinishReason, InvalidRequest, Request, SamplingParams, TokenOutput


class Observer(Protocol):
    """Is told what happens to generations and their choices, for metrics and traces. Times are seconds."""

    def started(self, generation: Generation) -> None:
        """Called in the task that asked for it, before anything else of it."""

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None: ...

    def next_token(self, choice: Choice, num_tokens: int, since_previous: float) -> None: ...

    def step(self, num_tokens: int) -> None:
        """One step's outputs have been told: it brought so many tokens, those of prompts with the first token of their answer. Called once for
        each step of a launch."""

    def finished(self, choice: Choice, reason: FinishReason, since_arrival: float) -> None:
        """Called once for every choice that was started; `choice.timing` is complete, or None when the engine told nothing of it."""

    def answered(self, generation: Generation) -> None:
        """Called once, after its last choice has finished."""

    def rejected(self, limit: str, num_choices: int) -> None:
        """So many choices were refused because of a limit of the queue, named as its option is: `max_num_queued_reqs`."""


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
        self._admission = AdmissionRate()
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
        priority: int = 0,
        constraint: Constraint | None = None,
        forced_token_ids: Sequence[int] = (),
        shown_token_ids: Iterable[int] = (),
    ) -> Generation:
        """Starts generating at once. The arguments are those of `Intake.requests`.

        Raises:
          InvalidRequest: the request does not fit the model, its id is in use (`param` is "request_id"), or the queue is full (503).
          EngineDead: the engine has failed.
        """
        requests = self.engine.intake.requests(
            request_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            param=param,
            priority=priority,
            constraint=constraint,
            forced_token_ids=forced_token_ids,
            shown_token_ids=shown_token_ids,
        )
        if any(request.id in self._live for request in requests):
            raise InvalidRequest(
                "request_id", f"A request with id {request_id!r} is under way.", "duplicate_request_id"
            )
        self._check_queue(requests)
        return self._start(requests)

    def _check_queue(self, requests: list[Request]) -> None:
        info, client = self.engine.info, self.client
        if client.num_waiting + len(requests) > info.max_num_queued:
            raise self._busy(
                len(requests),
                f"{client.num_waiting} requests are waiting, {len(requests)} more were asked for, and the limit is {info.max_num_queued}",
                "max_num_queued_reqs",
            )
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        # A single choice is never more than the queue takes; several of one prompt may be, and go in when nobody waits.
        if (
            info.max_num_queued_tokens is not None
            and client.num_waiting
            and client.num_waiting_tokens + num_tokens > info.max_num_queued_tokens
        ):
            raise self._busy(
                len(requests),
                f"{client.num_waiting_tokens} prompt tokens are waiting, {num_tokens} more were brought, and the limit is "
                f"{info.max_num_queued_tokens}",
                "max_num_queued_tokens",
            )

    def _busy(self, num_choices: int, why: str, limit: str) -> InvalidRequest:
        if self._observer is not None:
            self._observer.rejected(limit, num_choices)
        return InvalidRequest(None, f"The server is busy: {why} (--{limit.replace('_', '-')}).", "queue_full", 503)

    def _start(self, requests: list[Request]) -> Generation:
        generation = Generation(self, [Choice(request, self.engine.tokenizer) for request in requests])
        for choice in generation.choices:
            # Submit first: a dead engine refuses, and leaves no entry. Outputs reach this loop later than the next line.
            self.client.submit(choice.request)
            self._live[choice.request.id] = (generation, choice, choice.request.arrival)
        if self._observer is not None:
            self._observer.started(generation)
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

    @property
    def retry_after_seconds(self) -> int:
        """After how many seconds those that wait now will be running, by how fast requests have left the queue lately."""
        return self._admission.seconds_until_drained(self.client.num_waiting)

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix that no request holds; False when some are held and stay.

        Raises:
          EngineDead: the engine has failed.
        """
        return await asyncio.wrap_future(self.client.reset_prefix_cache())

    def close(self) -> None:
        """Stops the engine thread. Blocks for the step under way."""
        self.client.close()

    def _dispatch(self, outputs: list[TokenOutput]) -> None:
        now, num_tokens = time.monotonic(), [0]  # of each step of the launch
        for output in outputs:
            if output.request_id not in self._live:
                continue  # aborted here while the step ran
            generation, choice, arrival = self._live[output.request_id]
            delta = choice.feed(output)
            if output.timing is not None:
                choice.timing = output.timing
            num_tokens += [0] * (len(delta.token_ids) - len(num_tokens))
            for index in range(len(delta.token_ids)):
                num_tokens[index] += 1
            if delta.token_ids:
                previous = self._last_token.get(output.request_id)
                self._last_token[output.request_id] = now
                if previous is None:
                    num_tokens[0] += len(choice.request.prompt_token_ids)
                    self._admission.left_queue()
                if self._observer is not None and previous is None:
                    self._observer.first_token(choice, len(delta.token_ids), now - arrival)
                elif self._observer is not None and previous is not None:
                    self._observer.next_token(choice, len(delta.token_ids), now - previous)
            if delta.finish_reason is not None:
                if output.finish_reason is None:  # a stop string, which the engine knows nothing of
                    self.client.abort(output.request_id, FinishReason.STOP)
                self._end(choice, delta.finish_reason)
            generation._deltas.put_nowait(delta)
        if self._observer is not None:
            for count in filter(None, num_tokens):
                self._observer.step(count)

    def _end(self, choice: Choice, reason: FinishReason) -> None:
        generation, _, arrival = self._live.pop(choice.request.id)
        last_token = self._last_token.pop(choice.request.id, None)
        choice.finish_reason = reason
        if last_token is None:
            self._admission.left_queue()
        if choice.timing is not None and last_token is not None and last_token > (choice.timing.last_token or 0.0):
            choice.timing = dataclasses.replace(choice.timing, last_token=last_token)
        if self._observer is not None:
            self._observer.finished(choice, reason, time.monotonic() - arrival)
            if all(choice.finish_reason is not None for choice in generation.choices):
                self._observer.answered(generation)
