"""The generations behind one answer as one series of pieces: several prompts, several choices each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from tpu_serve.engine.choice import ChoiceDelta
from tpu_serve.engine.frontend import Generation
from tpu_serve.request import FinishReason, TokenLogprobs
from tpu_serve.server.errors import shutting_down
from tpu_serve.server.replies import Counts, RequestMetrics


@dataclass(slots=True)
class Piece:
    """A part of one choice that is worth sending: it has text, or it is the last one.

    Attributes:
      index: of the choice, counted over all prompts.
      token_ids: tokens since the previous piece; some belong to text that is still held back.
      logprobs: of these tokens, empty when not asked for.
      prompt_logprobs: of the prompt's tokens, on the first piece of a choice when asked for.
      is_first: no piece of this choice came before.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_first: bool = True


class Source(Protocol):
    """Where the pieces of an answer come from. `close` it whatever happens."""

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Every piece, in the order in which they come, choices interleaved.

        Raises:
          EngineDead: the engine failed.
          HttpError: the server stopped.
        """

    def counts(self) -> Counts:
        """Tokens of the pieces so far."""

    def metrics(self) -> RequestMetrics:
        """How long the answer took so far."""

    def close(self) -> None:
        """Ends what still runs; harmless when everything has finished."""


async def join(source: Source) -> list[Piece]:
    """All pieces of each choice as one, in order of index. A stream sends the pieces as they are: that is why both say the same."""
    whole: dict[int, Piece] = {}
    async with aclosing(source.pieces()) as pieces:
        async for piece in pieces:
            known = whole.setdefault(piece.index, piece)
            if known is not piece:
                known.text += piece.text
                known.token_ids += piece.token_ids
                known.logprobs += piece.logprobs
                known.prompt_logprobs = known.prompt_logprobs or piece.prompt_logprobs
                known.finish_reason, known.stop_reason = piece.finish_reason, piece.stop_reason
    return [whole[index] for index in sorted(whole)]


class Fanout:
    """Owns the generations of one answer; see `Source`.

    Args:
      generations: one per prompt, each with `num_choices` choices.
      openings: a text per prompt that its choices begin with, when the prompt is echoed.
      interval: tokens of a piece, at least; the first and the last one are never held back.
    """

    def __init__(
        self, generations: Sequence[Generation], num_choices: int, openings: Sequence[str] = (), *, interval: int = 1
    ):
        self._generations, self._num_choices, self._openings = generations, num_choices, openings
        self._interval = interval
        self._pumps: list[asyncio.Task[None]] = []
        self._pending: dict[int, Piece] = {}
        self._num_completion_tokens = 0
        self._num_prompt_tokens = sum(generation.num_prompt_tokens for generation in generations)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        if len(self._generations) > 1:
            async with aclosing(self._deltas()) as deltas:
                async for prompt, delta in deltas:
                    if (piece := self._take(self._add(prompt, delta))) is not None:
                        yield piece
            return
        generation = self._generations[0]
        async for delta in generation:
            # Several choices, or a client that is slower than the model: what is there goes out together, but for first tokens.
            indices = [self._add(0, delta)]
            while not self._pending[indices[-1]].is_first and (more := generation.next_ready()) is not None:
                indices.append(self._add(0, more))
            for index in indices if len(indices) == 1 else dict.fromkeys(indices):
                if (piece := self._take(index)) is not None:
                    yield piece

    def counts(self) -> Counts:
        num_cached = sum([generation.num_cached_tokens for generation in self._generations])
        return Counts(self._num_prompt_tokens, self._num_completion_tokens, num_cached)

    def metrics(self) -> RequestMetrics:
        return RequestMetrics.of([choice.timing for generation in self._generations for choice in generation.choices])

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for generation in self._generations:
            generation.close()

    def _add(self, prompt: int, delta: ChoiceDelta) -> int:
        """Adds a delta to what is pending of its choice, whose index it returns."""
        if delta.finish_reason is FinishReason.ABORT:
            raise shutting_down()
        index = prompt * self._num_choices + delta.index
        piece = self._pending.get(index)
        if piece is None:
            piece = self._pending[index] = Piece(index, self._openings[prompt] if self._openings else "")
        piece.text += delta.text
        piece.token_ids += delta.token_ids
        if delta.logprobs:
            piece.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            piece.prompt_logprobs = delta.prompt_logprobs
        piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        return index

    def _take(self, index: int) -> Piece | None:
        """What is pending of a choice, if it is worth sending."""
        piece = self._pending[index]
        is_due = piece.text and (piece.is_first or len(piece.token_ids) >= self._interval)
        if not is_due and piece.finish_reason is None:
            return None
        self._pending[index] = Piece(index, is_first=False)
        self._num_completion_tokens += len(piece.token_ids)
        return piece

    async def _deltas(self) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
        """Those of several prompts, each with the place of its prompt."""
        queue: asyncio.Queue[tuple[int, ChoiceDelta | Exception | None]] = asyncio.Queue()

        async def pump(prompt: int, generation: Generation) -> None:
            try:
                async for delta in generation:
                    queue.put_nowait((prompt, delta))
                queue.put_nowait((prompt, None))
            except Exception as error:
                queue.put_nowait((prompt, error))

        self._pumps = [asyncio.create_task(pump(*pair)) for pair in enumerate(self._generations)]
        num_open = len(self._pumps)
        while num_open:
            prompt, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield prompt, item
