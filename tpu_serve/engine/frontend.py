"""The engine as asyncio code sees it: start a generation, iterate over its deltas, close it to abort."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from tpu_serve.engine.admission import AdmissionRate
from tpu_serve.engine.choice import Choice, ChoiceDelta
from tpu_serve.engine.client import EngineDead, RequestFailed
from tpu_serve.engine.served import ServedEngine
from tpu_serve.request import Constraint, FinishReason, InvalidRequest, Request, SamplingParams, TokenOutput


class Observer(Protocol):
    """Is told what happens to generations and their choices, for metrics and traces. Times are seconds."""

    def started(self, generation: Generation) -> None:
        """Called in the task that asked for it, before anything else of it."""

    def first_token(self, choice: Choice, num_tokens: int, since_arrival: float) -> None: ...

    def next_tokens(self, num_tokens: int, since_previous: float) -> None:
        """A step brought so many tokens, of any choices, each so long after the token before it. First tokens are not among them."""

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
        self._deltas: deque[ChoiceDelta] = deque()
        self._arrival: asyncio.Future[None] | None = None  # of a delta, while somebody waits for one
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
        while not self._deltas:
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        delta = self._deltas.popleft()
        if delta.finish_reason is FinishReason.ERROR:
            self.close()
            kind = RequestFailed if self._frontend.client.is_alive else EngineDead
            raise kind(delta.error or "the engine failed")
        self._num_open -= delta.finish_reason is not None
        return delta

    def put(self, delta: ChoiceDelta) -> None:
        """Adds what comes next; for the frontend."""
        self._deltas.append(delta)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def next_ready(self) -> ChoiceDelta | None:
        """The next delta if it is there and tells of no failure; iteration goes on behind it."""
        if not self._deltas or not self._num_open:
            return None
        reason = self._deltas[0].finish_reason
        if reason is not None:
            if reason is FinishReason.ERROR or reason is FinishReason.ABORT:
                return None
            self._num_open -= 1
        return self._deltas.popleft()

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
      engine: one that is ready, in this process or another, used by nobody else.
      observer: is told about tokens and endings.
      on_failure: called in the loop when the engine has failed.

    Attributes:
      engine: with its tokenizer and model info.
      client: how the engine is reached.
    """

    def __init__(
        self, engine: ServedEngine, observer: Observer | None = None, on_failure: Callable[[str], None] = lambda _: None
    ):
        self.engine, self._observer = engine, observer
        # By the engine's ids. A client may use an id again as soon as it is free here, while outputs of the older request are on their way:
        # the engine never sees one twice.
        self._live: dict[str, tuple[Generation, Choice, float]] = {}
        self._last_token: dict[str, float] = {}
        self._engine_ids: dict[str, str] = {}  # by those of the requests
        self._num_started = 0
        self._admission = AdmissionRate()
        self.client = engine.connect(self._dispatch, on_failure)

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
        if any(request.id in self._engine_ids for request in requests):
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
            request, self._num_started = choice.request, self._num_started + 1
            engine_id = f"{request.id}@{self._num_started}"
            # Submit first: a dead engine refuses, and leaves no entry. Outputs reach this loop later than the next lines.
            self.client.submit(dataclasses.replace(request, id=engine_id))
            self._live[engine_id] = (generation, choice, request.arrival)
            self._engine_ids[request.id] = engine_id
        if self._observer is not None:
            self._observer.started(generation)
        return generation

    def abort(self, choice: Choice) -> None:
        """Aborts one choice; harmless when it has finished."""
        engine_id = self._engine_ids.get(choice.request.id)
        if engine_id is not None and self._live[engine_id][1] is choice:
            self.client.abort(engine_id)
            self._end(choice, FinishReason.ABORT)

    def abort_all(self) -> None:
        """Aborts every choice; the last delta of each says so. Does not wait for the engine, which may be stuck."""
        for generation, choice, _ in list(self._live.values()):
            self.abort(choice)
            generation.put(ChoiceDelta(index=choice.request.choice, finish_reason=FinishReason.ABORT))

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
        """Ends the engine. Blocks for the step under way."""
        self.client.close()

    def _dispatch(self, outputs: list[TokenOutput]) -> None:
        now, live, last_token = time.monotonic(), self._live, self._last_token
        num_in_step = [0]  # of each step of the launch
        # Tokens by how long they came after the ones before: nearly all of a step's took the same time.
        later: dict[float, int] = {}
        for output in outputs:
            engine_id = output.request_id
            entry = live.get(engine_id)
            if entry is None:
                continue  # aborted here while the step ran
            generation, choice, arrival = entry
            delta = choice.feed(output)
            if output.timing is not None:
                choice.timing = output.timing
            num_new = len(delta.token_ids)
            if num_new:
                num_in_step[0] += 1
                for place in range(1, num_new):
                    if place == len(num_in_step):
                        num_in_step.append(0)
                    num_in_step[place] += 1
                previous = last_token.get(engine_id)
                last_token[engine_id] = now
                if previous is None:
                    num_in_step[0] += len(choice.request.prompt_token_ids)
                    self._admission.left_queue()
                    if self._observer is not None:
                        self._observer.first_token(choice, num_new, now - arrival)
                else:
                    seconds = (now - previous) / num_new  # the tokens of one launch come together, and count alike
                    later[seconds] = later.get(seconds, 0) + num_new
            if delta.finish_reason is not None:
                if output.finish_reason is None:  # a stop string, which the engine knows nothing of
                    self.client.abort(engine_id, FinishReason.STOP)
                self._end(choice, delta.finish_reason)
            generation.put(delta)
        if self._observer is not None:
            for seconds, count in later.items():
                self._observer.next_tokens(count, seconds)
            for count in filter(None, num_in_step):
                self._observer.step(count)

    def _end(self, choice: Choice, reason: FinishReason) -> None:
        engine_id = self._engine_ids.pop(choice.request.id)
        generation, _, arrival = self._live.pop(engine_id)
        last_token = self._last_token.pop(engine_id, None)
        choice.finish_reason = reason
        if last_token is None:
            self._admission.left_queue()
        if choice.timing is not None and last_token is not None and last_token > (choice.timing.last_token or 0.0):
            choice.timing = dataclasses.replace(choice.timing, last_token=last_token)
        if self._observer is not None:
            self._observer.finished(choice, reason, time.monotonic() - arrival)
            if all(choice.finish_reason is not None for choice in generation.choices):
                self._observer.answered(generation)
