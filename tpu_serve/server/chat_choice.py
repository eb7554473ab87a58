"""One choice of a chat answer: pieces of text in, parts of a message out."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from tpu_serve.parsing.answer import AnswerParser
from tpu_serve.parsing.counter import ReasoningCounter
from tpu_serve.parsing.events import CallStart, ContentText, Event, ReasoningText
from tpu_serve.request import FinishReason
from tpu_serve.server.fanout import Piece
from tpu_serve.server.replies import (
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from tpu_serve.server.tools import ToolUse


@dataclass(slots=True)
class CallPart:
    """A part of a call: the first one has its id and name, all others have arguments.

    Attributes:
      index: which of the message's calls.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


MessagePart = ContentText | ReasoningText | CallPart
"""What a piece adds to a message."""


class ChatChoiceReader:
    """Reads the pieces of one choice, in order. A whole message is made of what a stream sends, which is why both say the same.

    Args:
      parser: of this choice's text.
      counter: of its reasoning's tokens; None when reasoning is not told from the rest.
      use: what the request wants with its tools.
      shows_reasoning: otherwise reasoning is left out.
      repeats_reasoning: send it under its older name too.
      opening: text that the content begins with, not the model's.

    Attributes:
      finish_reason: of the choice, once the last piece was read.
    """

    def __init__(
        self,
        parser: AnswerParser,
        counter: ReasoningCounter | None,
        use: ToolUse,
        *,
        shows_reasoning: bool = True,
        repeats_reasoning: bool = True,
        opening: str = "",
    ):
        self._parser, self._counter, self._use = parser, counter, use
        self._shows_reasoning, self._repeats_reasoning = shows_reasoning, repeats_reasoning
        self._opening = opening
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        self._has_reasoned = False
        self.finish_reason: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._counter is None else self._counter.num_tokens

    def read(self, piece: Piece) -> list[MessagePart]:
        """What a piece adds to the message, in order; nothing while a tag or a header is incomplete."""
        if self._counter is not None:
            self._counter.see(piece.token_ids)
        parts: list[MessagePart] = []
        if self._opening:
            self._add(ContentText(self._opening), parts)
            self._opening = ""
        for event in self._parser.feed(piece.text):
            self._add(event, parts)
        if piece.finish_reason is not None:
            ended_itself = piece.finish_reason is FinishReason.STOP and not isinstance(piece.stop_reason, str)
            for event in self._parser.finish(is_cut=not ended_itself):
                self._add(event, parts)
            called = self._calls and piece.finish_reason is FinishReason.STOP and self._use.mode != "named"
            self.finish_reason = "tool_calls" if called else str(piece.finish_reason)
        return parts

    def message(self) -> ChatMessage:
        """The whole message so far."""
        content, reasoning = "".join(self._content), "".join(self._reasoning) or None
        has_more = self._has_reasoned or bool(self._calls)
        return ChatMessage(
            content=None if has_more and not content else content,
            reasoning=reasoning,
            reasoning_content=reasoning if self._repeats_reasoning else None,
            tool_calls=[
                ToolCall(id=call_id, function=FunctionCall(name=name, arguments="".join(pieces)))
                for call_id, name, pieces in self._calls
            ]
            or None,
        )

    def _add(self, event: Event, parts: list[MessagePart]) -> None:
        if isinstance(event, ContentText):
            self._content.append(event.text)
            parts.append(event)
        elif isinstance(event, ReasoningText):
            self._has_reasoned = True
            if self._shows_reasoning:
                self._reasoning.append(event.text)
                parts.append(event)
        elif isinstance(event, CallStart):
            self._is_dropped = self._use.keeps_one and bool(self._calls)
            if not self._is_dropped:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                self._calls.append((call_id, event.name, []))
                parts.append(CallPart(len(self._calls) - 1, "", call_id, event.name))
        elif not self._is_dropped:
            self._calls[-1][2].append(event.text)
            parts.append(CallPart(len(self._calls) - 1, event.text))
