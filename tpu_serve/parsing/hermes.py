"""Calls of tools in the form of Hermes, which most Qwen models write: a JSON object between two tags."""

from __future__ import annotations

from tpu_serve.parsing.json_text import read_string, read_value, strict_json
from tpu_serve.parsing.parser import CallParser
from tpu_serve.parsing.reader import Steps

START, END = "<tool_call>", "</tool_call>"


class HermesCalls(CallParser):
    """<tool_call>{"name": "f", "arguments": {…}}</tool_call>, any number of them.

    The keys may come in any order and `parameters` stands for `arguments`; a closing tag may be missing. Arguments are passed on as they are
    written, closing tags in their strings included.
    """

    def _program(self) -> Steps[None]:
        reader = self._reader
        while (yield from reader.until((START,), self._content)) is not None:
            reader.record(START)
            if (yield from CallObject(self).read()):
                reader.recorded_text()
                yield from self._after()
            else:
                self._content(reader.recorded_text())

    def _after(self) -> Steps[None]:
        """The closing tag. Brackets too many in front of it are a common slip and are left out."""
        reader = self._reader
        reader.record()
        yield from reader.spaces(" \t\r\n}]")
        closed = yield from reader.skip(END)
        extra = reader.recorded_text()
        if not closed:
            self._content(extra)


class CallObject:
    """A JSON object with the name and the arguments of one call, read for a parser."""

    def __init__(self, parser: CallParser):
        self._parser, self._reader = parser, parser._reader
        self._name: str | None = None
        self._held: str | None = None
        self.is_started = False

    def read(self) -> Steps[bool]:
        """False when this is no call and nothing was said; what was read of it is in the reader's record then."""
        reader = self._reader
        yield from reader.spaces()
        if not (yield from reader.skip("{")):
            return False
        while True:
            yield from reader.spaces(" \t\r\n,")
            if (yield from reader.skip("}")):
                break
            if not (yield from self._entry()):
                return self.is_started
        if self._name is None:
            return False
        self._start()
        return True

    def _entry(self) -> Steps[bool]:
        """One key and its value. False when the object cannot be read further."""
        reader = self._reader
        key = yield from read_string(reader)
        if key is None:
            return False
        yield from reader.spaces()
        if not (yield from reader.skip(":")):
            return False
        yield from reader.spaces()
        if key == "name" and self._name is None:
            self._name = (yield from read_string(reader)) or None
            return self._name is not None
        if key not in ("arguments", "parameters") or self._held is not None or self.is_started:
            return (yield from read_value(reader, lambda _: None))
        if self._name is None or (yield from reader.peek()) != "{":
            pieces: list[str] = []
            complete = yield from read_value(reader, pieces.append)
            self._held = _plain("".join(pieces))
            return complete
        self._start(arguments="")
        return (yield from read_value(reader, self._parser._arguments))

    def _start(self, arguments: str = "{}") -> None:
        if not self.is_started and self._name is not None:
            self.is_started = True
            self._parser._call(self._name)
            self._parser._arguments(arguments if self._held is None else self._held)


def _plain(raw: str) -> str:
    """Arguments that are the text of an object in a string, or null, as the object."""
    try:
        value = strict_json(raw)
        if value is None:
            return "{}"
        if isinstance(value, str) and isinstance(strict_json(value), dict):
            return value
    except ValueError:
        pass
    return raw
