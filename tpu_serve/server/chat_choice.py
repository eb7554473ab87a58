"""One choice of a chat answer: pieces of text in, parts of a message out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from tpu_serve.parsing.answer import AnswerParser
from tpu_serve.parsing.counter import ReasoningCounter
from tpu_serve.parsing.events import CallArguments, CallStart, ContentText, Event, ReasoningText
from tpu_serve.request import FinishReason
from tpu_serve.server.fanout import Piece
from tpu_serve.server.replies import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from tpu_serve.server.tools import ToolUse


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

    def read(self, piece: Piece) -> list[ChatDelta]:
        """What a piece adds to the message, in order; nothing while a tag or a header is incomplete."""
        if self._counter is not None:
            self._counter.see(piece.token_ids)
        events: list[Event] = [ContentText(self._opening)] if self._opening else []
        self._opening = ""
        events += self._parser.feed(piece.text)
        if piece.finish_reason is not None:
            ended_itself = piece.finish_reason is FinishReason.STOP and not isinstance(piece.stop_reason, str)
            events += self._parser.finish(is_cut=not ended_itself)
        deltas = [delta for event in events for delta in self._delta(event)]
        if piece.finish_reason is not None:
            called = self._calls and piece.finish_reason is FinishReason.STOP and self._use.mode != "named"
            self.finish_reason = "tool_calls" if called else str(piece.finish_reason)
        return deltas

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

    def _delta(self, event: Event) -> Iterator[ChatDelta]:
        match event:
            case ContentText(text):
                self._content.append(text)
                yield ChatDelta(content=text)
            case ReasoningText(text):
                self._has_reasoned = True
                if self._shows_reasoning:
                    self._reasoning.append(text)
                    delta = ChatDelta(reasoning=text)
                    if self._repeats_reasoning:
                        delta.reasoning_content = text
                    yield delta
            case CallStart(name):
                self._is_dropped = self._use.keeps_one and bool(self._calls)
                if not self._is_dropped:
                    call_id = f"call_{uuid.uuid4().hex[:24]}"
                    self._calls.append((call_id, name, []))
                    function = FunctionDelta(name=name, arguments="")
                    yield self._call(
                        ToolCallDelta(index=len(self._calls) - 1, id=call_id, type="function", function=function)
                    )
            case CallArguments(text):
                if not self._is_dropped:
                    self._calls[-1][2].append(text)
                    yield self._call(ToolCallDelta(index=len(self._calls) - 1, function=FunctionDelta(arguments=text)))

    @staticmethod
    def _call(delta: ToolCallDelta) -> ChatDelta:
        return ChatDelta(tool_calls=[delta])
