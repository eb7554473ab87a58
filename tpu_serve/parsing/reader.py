"""Reading a text that arrives in pieces, without the pieces being seen.

A parser is written as a generator that reads characters and waits (by `yield`) where it must see more before it can decide. What it decides
therefore depends on the text alone, never on where it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser, used by `yield from`."""


class Reader:
    """The text that has arrived and was not read yet.

    Attributes:
      is_closed: nothing more will arrive.
      recorded: what was read since `record`; None while nobody wants it.
    """

    def __init__(self) -> None:
        self._text, self._position = "", 0
        self.is_closed = False
        self.recorded: list[str] | None = None
        self._emit: Callable[[str], Any] | None = None  # while `until` waits and everything was read
        self._firsts: frozenset[str] = frozenset()

    def pass_on(self, text: str) -> bool:
        """Does what reading this text next would do, where that is plain to see: it goes where text goes that is no marker. False, and
        nothing is done, where it is not. Nearly all of a stream is such text."""
        if self._emit is None or not self._firsts.isdisjoint(text):
            return False
        self._emit(text)
        return True

    def append(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def drop(self) -> None:
        """Forgets what has arrived and was not read."""
        self._text, self._position = "", 0

    def record(self, start: str = "") -> None:
        """Keeps a copy of what is read from now on, after `start`."""
        self.recorded = [start]

    def recorded_text(self) -> str:
        """What was read since `record`, which ends with this."""
        text = "".join(self.recorded or ())
        self.recorded = None
        return text

    def take(self, count: int) -> str:
        """Reads so many characters, which must have arrived."""
        text = self._text[self._position : self._position + count]
        self._position += count
        if self.recorded is not None:
            self.recorded.append(text)
        return text

    def put_back(self, text: str) -> None:
        """Undoes the reading of what was read last."""
        self._text, self._position = text + self._text[self._position :], 0

    def peek(self) -> Steps[str]:
        """The next character, not read; "" at the end."""
        while self._position == len(self._text) and not self.is_closed:
            yield
        return self._text[self._position : self._position + 1]

    def is_next(self, *markers: str) -> Steps[str | None]:
        """The first of these that comes next, not read. Waits only while what has arrived may still become one of them."""
        while True:
            text = self._text[self._position :]
            for marker in markers:
                if text.startswith(marker):
                    return marker
            if self.is_closed or not any(marker.startswith(text) for marker in markers):
                return None
            yield

    def is_rest_part_of(self, *markers: str) -> bool:
        """Whether what has arrived and was not read, or nothing, is the beginning of one of these."""
        rest = self._text[self._position :]
        return any(marker.startswith(rest) for marker in markers)

    def skip(self, *markers: str) -> Steps[bool]:
        """Reads one of these if it comes next."""
        marker = yield from self.is_next(*markers)
        if marker is None:
            return False
        self.take(len(marker))
        return True

    def spaces(self, characters: str = " \t\r\n") -> Steps[str]:
        """Reads as many of these as come."""
        found = []
        while (character := (yield from self.peek())) and character in characters:
            found.append(self.take(1))
        return "".join(found)

    def until(self, markers: Collection[str], emit: Callable[[str], Any]) -> Steps[str | None]:
        """Reads up to the first marker that is complete, and the marker. Returns it, or None at the end of the text.

        Args:
          emit: is given the text before it, as soon as that cannot be part of a marker any more.
        """
        firsts = frozenset(marker[0] for marker in markers)
        while True:
            text = self._text[self._position :]
            found = (
                []
                if firsts.isdisjoint(text)
                else [(start + len(marker), start, marker) for marker in markers if (start := text.find(marker)) >= 0]
            )
            if found:
                _, start, marker = min(found)
                if start:
                    emit(self.take(start))
                self.take(len(marker))
                return marker
            held = 0 if self.is_closed else num_held(text, markers)
            if len(text) > held:
                emit(self.take(len(text) - held))
            if self.is_closed:
                return None
            if not held and self.recorded is None:
                self._firsts, self._emit = firsts, emit
            yield
            self._emit = None


def num_held(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` with which one of the markers begins but does not end."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0:
            if marker.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start = text.find(marker[0], start + 1)
    return longest
