"""What every parser of a model's text is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tpu_serve.parsing.events import CallArguments, CallStart, ContentText, Event, ReasoningText
from tpu_serve.parsing.reader import Reader, Steps


class Parser(ABC):
    """One text, fed in pieces of any size. However it is split, the events are the same once they are `merged`. Nothing raises.

    Attributes:
      is_reasoning: the text read last was reasoning.
      is_over: nothing but content can follow.
    """

    def __init__(self) -> None:
        self.is_reasoning = self.is_over = False
        self._reader = Reader()
        self._events: list[Event] = []
        self._is_cut = False
        self._steps: Steps[None] | None = None

    def begin(self, prompt_end: str) -> list[Event]:
        """Reads what the prompt has written of the answer already, which decides where the answer goes on. Its events are no part of it."""
        events = self.feed(prompt_end)
        self._reader.drop()
        return events

    def feed(self, text: str) -> list[Event]:
        """Events that the next piece of text makes certain."""
        if text and not self._reader.pass_on(text):
            self._reader.append(text)
            self._run()
        return self._take()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """The remaining events.

        Args:
          is_cut: the text did not come to its end by itself, so that a call which is open is not closed for it.
        """
        self._reader.is_closed, self._is_cut = True, is_cut
        self._run()
        return self._take()

    def _run(self) -> None:
        if self._steps is None:
            self._steps = self._program()
        next(self._steps, None)

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _program(self) -> Steps[None]:
        """Reads everything until the reader is closed and empty."""

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningText(text))

    def _content(self, text: str) -> None:
        if text:
            self._events.append(ContentText(text))

    def _call(self, name: str) -> None:
        self._events.append(CallStart(name))

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))


class CallParser(Parser):
    """Text with calls of tools in it. White space next to a call belongs to the format and is left out; without calls nothing is.

    What looks like a call and is none is content.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spaces = ""
        self._has_content = self._has_calls = False

    def begin(self, prompt_end: str) -> list[Event]:
        events = super().begin(prompt_end)
        self._has_content, self._spaces = self._has_content or bool(self._spaces), ""
        return events

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        events = super().finish(is_cut=is_cut)
        if self._spaces and not self._has_calls:
            events.append(ContentText(self._spaces))
        return events

    def _content(self, text: str) -> None:
        words = text.rstrip()
        if not words:
            self._spaces += text
            return
        if self._has_calls and not self._has_content:
            words, self._spaces = words.lstrip(), ""
        super()._content(self._spaces + words)
        self._spaces, self._has_content = text[len(text.rstrip()) :], True

    def _call(self, name: str) -> None:
        # What separates text from a call would separate it from the text behind the call as well.
        self._has_calls = True
        super()._call(name)
