"""Reasoning between two tags, such as <think> and </think>."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_serve.parsing.events import Event
from tpu_serve.parsing.parser import Parser
from tpu_serve.parsing.reader import Steps


class TagReasoning(Parser):
    """Splits reasoning from content; line breaks next to the tags belong to the format and are left out.

    Without an opening tag everything is content; without a closing one everything after the opening tag is reasoning.

    Args:
      start, end: the tags.
      label: a word that the start is followed by and that is left out, if there.
      is_open: the text begins inside of reasoning.
      anywhere: reasoning may begin in the middle of the content, too; otherwise only white space may precede it.
      ends: texts that end reasoning without its tag and belong to the content, since what they begin is never a thought.
    """

    def __init__(
        self,
        start: str,
        end: str,
        *,
        label: str = "",
        is_open: bool = False,
        anywhere: bool = False,
        ends: Sequence[str] = (),
    ):
        super().__init__()
        self._start, self._end, self._label = start, end, label
        self._is_open, self._anywhere, self._ends = is_open, anywhere, tuple(ends)
        self._breaks = ""

    def begin(self, prompt_end: str) -> list[Event]:
        events = super().begin(prompt_end)
        self._breaks = ""
        return events

    def _program(self) -> Steps[None]:
        reader = self._reader
        if not self._is_open:
            spaces = yield from reader.spaces()
            if not (yield from reader.skip(self._start)):
                self._content(spaces)
                if (yield from self._rest()):
                    return
        while True:
            yield from self._thought()
            if (yield from self._rest()):
                return

    def _rest(self) -> Steps[bool]:
        """Content up to where reasoning begins again. True when it does not."""
        markers = (self._start,) if self._anywhere else ()
        self.is_over = not self._anywhere
        return (yield from self._reader.until(markers, self._content)) is None

    def _thought(self) -> Steps[None]:
        """From behind the start tag to the first character of the content."""
        reader = self._reader
        self.is_reasoning = True
        if self._label:
            yield from reader.skip(self._label)
        yield from reader.spaces("\r\n")
        if (yield from reader.skip(self._start)):  # written by the prompt and by the model
            yield from reader.spaces("\r\n")
        self._breaks = ""
        marker = yield from reader.until((self._end, *self._ends), self._hold_breaks)
        if marker is None:
            self._reasoning(self._breaks)
            return
        self.is_reasoning = False
        if marker == self._end:
            yield from reader.spaces("\r\n")
        else:
            self._content(marker)

    def _hold_breaks(self, text: str) -> None:
        words = text.rstrip("\r\n")
        if words:
            self._reasoning(self._breaks + words)
            self._breaks = ""
        self._breaks += text[len(words) :]
