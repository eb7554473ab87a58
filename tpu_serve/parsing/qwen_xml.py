"""Calls of tools in the form of Qwen3-Coder and Qwen3.5: tags for the function and for every argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpu_serve.parsing.json_text import escaped
from tpu_serve.parsing.parser import CallParser
from tpu_serve.parsing.reader import Steps
from tpu_serve.parsing.schema import is_text, json_of, properties_of

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class QwenXmlCalls(CallParser):
    """<tool_call><function=f><parameter=key>value</parameter></function></tool_call>, any number of them.

    The outer tags may be missing around a declared function. A value loses one line break at either end; it is text, passed on as it comes,
    unless its schema asks for something else. A value ends at its closing tag, or where the next argument or the end of the call begins.

    Args:
      tools: what may be called, with the schemas of the arguments.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()):
        super().__init__()
        self._tools = tools
        names = [tool["function"].get("name") for tool in tools if isinstance(tool.get("function"), Mapping)]
        self._bare = tuple(f"{FUNCTION}{name}>" for name in names if isinstance(name, str) and name)

    def _program(self) -> Steps[None]:
        reader = self._reader
        while (marker := (yield from reader.until((START, *self._bare), self._content))) is not None:
            if marker != START:
                yield from self._call_of(marker[len(FUNCTION) : -1])
                continue
            reader.record(START)
            yield from reader.spaces()
            name = (yield from self._name(">")) if (yield from reader.skip(FUNCTION)) else ""
            raw = reader.recorded_text()
            if name:
                yield from self._call_of(name)
            else:
                self._content(raw)

    def _name(self, end: str) -> Steps[str]:
        """A name up to and with its end; "" when there is none on this line."""
        reader, name = self._reader, ""
        while (character := (yield from reader.peek())) and character not in "\r\n<":
            reader.take(1)
            if character == end:
                return name.strip()
            name += character
        return ""

    def _call_of(self, name: str) -> Steps[None]:
        """From behind the function's name to the end of the call."""
        reader, properties = self._reader, properties_of(self._tools, name)
        self._call(name)
        self._arguments("{")
        num_arguments, closed = 0, False
        while True:
            yield from reader.spaces()
            marker = yield from reader.is_next(PARAMETER, PARAMETER_END, FUNCTION_END, END)
            if marker is None:
                is_tag_cut = self._is_cut and reader.is_rest_part_of(PARAMETER, PARAMETER_END, FUNCTION_END, END)
                if is_tag_cut:
                    reader.drop()
                closed = not is_tag_cut
                break
            if marker == END:
                closed = True
                break
            reader.take(len(marker))
            if marker == FUNCTION_END:
                closed = True
                break
            if marker == PARAMETER_END:  # of an argument that ended without it
                continue
            key = yield from self._name(">")
            if not key and not (yield from reader.peek()):
                closed = not self._is_cut
                break
            self._arguments(("," if num_arguments else "") + f'"{escaped(key)}":')
            num_arguments += 1
            if not (yield from self._value(properties.get(key))):
                closed = not self._is_cut
                break
        if closed:
            self._arguments("}")
        yield from reader.spaces()
        yield from reader.skip(END)

    def _value(self, schema: Any) -> Steps[bool]:
        """One value up to its end. False when the text ends first."""
        reader, streams = self._reader, is_text(schema)
        pieces: list[str] = []
        held = ""

        def emit(text: str) -> None:
            nonlocal held
            if not streams:
                pieces.append(text)
                return
            text = held + text
            held = "\n" if text.endswith("\n") else ""
            self._arguments(escaped(text.removesuffix("\n")))

        if streams:
            self._arguments('"')
        yield from reader.skip("\r\n", "\n")
        marker = yield from reader.until((PARAMETER_END, PARAMETER, FUNCTION_END, END), emit)
        if marker is not None and marker != PARAMETER_END:
            reader.put_back(marker)
        if marker is None and self._is_cut:
            return False
        self._arguments('"' if streams else json_of("".join(pieces).removesuffix("\n"), schema))
        return marker is not None
