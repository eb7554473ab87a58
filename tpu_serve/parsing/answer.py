"""The whole way from a model's text to events: reasoning first, then calls."""

from __future__ import annotations

from tpu_serve.parsing.events import ContentText, Event, ReasoningText, merged
from tpu_serve.parsing.parser import Parser


class AnswerParser:
    """Feeds a text through a parser of reasoning and what that calls content through a parser of calls; either may be missing.

    Args:
      prompt_end: what the prompt has written of the answer already.
      keeps_reasoning: otherwise reasoning is content like any other text.
    """

    def __init__(
        self,
        reasoning: Parser | None = None,
        calls: Parser | None = None,
        *,
        prompt_end: str = "",
        keeps_reasoning: bool = True,
    ):
        self._reasoning, self._calls, self._keeps_reasoning = reasoning, calls, keeps_reasoning
        written: list[Event] = [ContentText(prompt_end)]
        if prompt_end.strip():
            if reasoning is not None:
                written = reasoning.begin(prompt_end)
            if calls is not None:
                calls.begin("".join(event.text for event in written if isinstance(event, ContentText)))

    @property
    def is_reasoning(self) -> bool:
        """The text fed last was reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def is_past_reasoning(self) -> bool:
        """No more reasoning can come."""
        return self._reasoning is None or self._reasoning.is_over

    def feed(self, text: str) -> list[Event]:
        events: list[Event]
        if self._reasoning is not None:
            events = self._with_calls(self._reasoning.feed(text))
        elif self._calls is not None:
            events = self._calls.feed(text)
        else:
            events = [ContentText(text)] if text else []
        return events if len(events) < 2 else list(merged(events))

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The remaining events; see `Parser.finish`."""
        events: list[Event] = []
        if self._reasoning is not None:
            events += self._with_calls(self._reasoning.finish(is_cut=is_cut))
        if self._calls is not None:
            events += self._calls.finish(is_cut=is_cut)
        return list(merged(events))

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._calls is None and self._keeps_reasoning:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, ReasoningText) and not self._keeps_reasoning:
                event = ContentText(event.text)
            if self._calls is not None and isinstance(event, ContentText):
                found += self._calls.feed(event.text)
            else:
                found.append(event)
        return found
