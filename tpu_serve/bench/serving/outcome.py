"""What became of one request, by the client's clock."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Outcome:
    """One request. All times are seconds on one monotonic clock.

    Attributes:
      start: just before it was sent.
      chunk_times: arrival of each chunk that has choices; one that only names the role of who speaks is none.
      prompt_tokens: as the server counted them, as the client did when the server does not say.
      output_tokens: likewise, -1 until known.
      text: what was generated, reasoning included.
      cause: a short name of why it failed, equal for failures of one kind; None for a success.
      error: what was said about it; empty for a success.
      end: when the exchange was over, however it ended.
    """

    start: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = -1
    text: str = ""
    cause: str | None = None
    error: str = ""
    end: float = 0.0

    @property
    def is_success(self) -> bool:
        return self.cause is None

    @property
    def ttft(self) -> float:
        """From sending to the first chunk, 0 without any."""
        return self.chunk_times[0] - self.start if self.chunk_times else 0.0

    @property
    def itls(self) -> list[float]:
        """From each chunk to the next."""
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def latency(self) -> float:
        """From sending to the last chunk, 0 without any."""
        return self.chunk_times[-1] - self.start if self.chunk_times else 0.0

    @property
    def tpot(self) -> float:
        """Mean time of a token after the first, 0 when there is none."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    def fail(self, cause: str, error: str) -> None:
        """The first failure is the one that counts."""
        if self.cause is None:
            self.cause, self.error = cause, error


class AnswerReader:
    """Follows the events of one streamed answer into an `Outcome`."""

    def __init__(self, outcome: Outcome):
        self._outcome = outcome
        self._pieces: list[str] = []
        self._has_end = False

    def event(self, data: str, at: float) -> None:
        """Takes the data of one event that arrived at `at`."""
        outcome = self._outcome
        if data.strip() == "[DONE]":
            self._has_end = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            outcome.fail("not JSON", f"An event is no JSON object: {data[:200]}")
            return
        if chunk.get("error"):
            cause, error = explain_error(chunk)
            outcome.fail(f"error in the stream{f' ({cause})' if cause else ''}", error)
            return
        self._usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices:
            self._choices(choices, at)

    def body(self, data: bytes, at: float) -> None:
        """Takes a whole answer that was not streamed."""
        self.event(data.decode("utf-8", "replace"), at)
        self._has_end = True

    def close(self) -> None:
        """The answer is over; says what is missing of it."""
        outcome = self._outcome
        outcome.text = "".join(self._pieces)
        if not self._has_end:
            outcome.fail("ended early", "The answer ended without a finish_reason and without [DONE].")
        if not outcome.chunk_times:
            outcome.fail("no answer", "The answer has no chunk with choices.")

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        if isinstance(usage.get("prompt_tokens"), int):
            self._outcome.prompt_tokens = usage["prompt_tokens"]
        if isinstance(usage.get("completion_tokens"), int):
            self._outcome.output_tokens = usage["completion_tokens"]

    def _choices(self, choices: list[Any], at: float) -> None:
        is_content = False
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            self._has_end |= choice.get("finish_reason") is not None
            said = choice.get("delta", choice.get("message"))
            if isinstance(said, dict):
                words = [said.get("reasoning_content") or said.get("reasoning"), said.get("content")]
                self._pieces += [word for word in words if isinstance(word, str)]
                is_content |= any(words) or bool(said.get("tool_calls")) or choice.get("finish_reason") is not None
                is_content |= "role" not in said
            else:
                is_content = True
                if isinstance(choice.get("text"), str):
                    self._pieces.append(choice["text"])
            if choice.get("finish_reason") == "error":
                self._outcome.fail("finish_reason error", "The server ended the answer with finish_reason error.")
        if is_content:
            self._outcome.chunk_times.append(at)


def explain_error(body: Any) -> tuple[str, str]:
    """(kind, message) of an error body, in the shapes of several servers; empty where it does not say."""
    error = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    if isinstance(error, dict):
        kind = error.get("reason") or error.get("type") or ""
        return str(kind), str(error.get("message") or error)
    return "", str(error or "")
