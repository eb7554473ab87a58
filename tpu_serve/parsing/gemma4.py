"""Calls of tools in the form of Gemma 4: a notation of its own for objects, with strings between <|"|>."""

from __future__ import annotations

from tpu_serve.parsing.json_text import escaped, read_string, strict_json
from tpu_serve.parsing.parser import CallParser
from tpu_serve.parsing.reader import Steps

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESPONSE = "<|tool_response>"
"""Follows the calls and ends the answer; where it does not, it is left out."""


class Gemma4Calls(CallParser):
    """<|tool_call>call:f{text:<|"|>…<|"|>,number:3,list:[…]}<tool_call|>, any number of them; the word `call` may be missing.

    Arguments become JSON as they come. A call that ends early has its brackets closed.
    """

    def _program(self) -> Steps[None]:
        reader = self._reader
        while (marker := (yield from reader.until((START, RESPONSE), self._content))) is not None:
            if marker == RESPONSE:
                continue
            reader.record(START)
            name, has_arguments = yield from self._name()
            raw = reader.recorded_text()
            if not name:
                self._content(raw)
                continue
            self._call(name)
            if has_arguments:
                yield from _Object(self).read()
            else:
                self._arguments("{}")
            yield from reader.spaces()
            yield from reader.skip(END)

    def _name(self) -> Steps[tuple[str, bool]]:
        """The name and whether arguments follow; no name when this is no call."""
        reader, name = self._reader, ""
        yield from reader.spaces()
        yield from reader.skip("call")
        if not (yield from reader.skip(":")):
            return "", False
        while (character := (yield from reader.peek())) and (character.isalnum() or character in "_-./"):
            name += reader.take(1)
        if (yield from reader.is_next("{")):
            return name, True
        return (name if (yield from reader.is_next(END)) else ""), False


class _Object:
    """An object in Gemma's notation, read for a parser and passed on as JSON."""

    def __init__(self, parser: CallParser):
        self._parser, self._reader, self._emit = parser, parser._reader, parser._arguments
        self._stack: list[str] = []
        self._num_items: list[int] = []

    def read(self) -> Steps[None]:
        self._open()
        while self._stack:
            yield from self._reader.spaces(" \t\r\n,")
            if (yield from self._reader.is_next(END)):
                self._close_all()
                return
            character = yield from self._reader.peek()
            if not character:
                break
            if character in "}]":
                self._reader.take(1)
                self._emit(self._close())
                continue
            comma = "," if self._num_items[-1] else ""
            self._num_items[-1] += 1
            if self._stack[-1] == "]":
                self._emit(comma)
            elif not (yield from self._key(comma)):
                break
            if not (yield from self._value()):
                break
        if not self._parser._is_cut:
            self._close_all()

    def _open(self) -> None:
        bracket = self._reader.take(1)
        self._emit(bracket)
        self._stack.append("}" if bracket == "{" else "]")
        self._num_items.append(0)

    def _close(self) -> str:
        # Whatever bracket was written, the one that is open is closed.
        self._num_items.pop()
        return self._stack.pop()

    def _close_all(self) -> None:
        while self._stack:
            self._emit(self._close())

    def _key(self, comma: str) -> Steps[bool]:
        """False when the text is cut in it."""
        pieces: list[str] = []
        if (yield from self._reader.skip(QUOTE)):
            yield from self._reader.until((QUOTE,), pieces.append)
        elif (yield from self._reader.peek()) == '"':
            pieces.append((yield from read_string(self._reader)) or "")
        else:
            while (character := (yield from self._reader.peek())) and character not in ":,{}[]<":
                pieces.append(self._reader.take(1))
        yield from self._reader.spaces()
        yield from self._reader.is_next(QUOTE, END)  # for what is left to be known
        if self._parser._is_cut and self._reader.is_rest_part_of(QUOTE, END):
            return False
        yield from self._reader.skip(":")
        yield from self._reader.spaces()
        self._emit(f'{comma}"{escaped("".join(pieces).strip())}":')
        return True

    def _value(self) -> Steps[bool]:
        """False when the text ends first."""
        reader = self._reader
        if (yield from reader.skip(QUOTE)):
            self._emit('"')
            marker = yield from reader.until((QUOTE, END), lambda text: self._emit(escaped(text)))
            if marker is None and self._parser._is_cut:
                return False
            self._emit('"')
            if marker == END:
                reader.put_back(END)
            return marker is not None
        character = yield from reader.peek()
        if character and character in "{[":
            self._open()
            return True
        if character == '"':
            value = yield from read_string(reader)
            if value is None and self._parser._is_cut:
                return False
            self._emit("null" if value is None else f'"{escaped(value)}"')
            return value is not None
        return (yield from self._bare())

    def _bare(self) -> Steps[bool]:
        """A number, true, false or null; any other word is a string without its quotes."""
        reader, pieces = self._reader, []
        while (character := (yield from reader.peek())) and character not in ",}]":
            if (yield from reader.is_next(END, QUOTE)):
                break
            pieces.append(reader.take(1))
        text = "".join(pieces).strip()
        if not character and self._parser._is_cut:
            is_word = (
                not any(word.startswith(text) for word in ("true", "false", "null")) and text[:1] not in "-0123456789"
            )
            self._emit('"' * is_word + escaped(text))
            return False
        if (yield from reader.is_next(QUOTE)):  # a closing quote whose opening one is missing
            yield from reader.skip(QUOTE)
        try:
            strict_json(text)
        except ValueError:
            text = "null" if not text else f'"{escaped(text)}"'
        self._emit(text)
        return bool(character)
