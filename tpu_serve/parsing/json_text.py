"""JSON in a text that is not over yet: where a value ends, and pieces of it as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tpu_serve.parsing.reader import Reader, Steps

_SCALAR_END = re.compile(r"[\s,\]}]")


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string. Pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def strict_json(text: str) -> Any:
    """The value of a JSON text without NaN and infinities. Raises `ValueError` for anything else."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_string(reader: Reader) -> Steps[str | None]:
    """Reads a JSON string and returns its value; None when no string comes, or one that does not end or is none."""
    if (yield from reader.peek()) != '"':
        return None
    raw: list[str] = []
    complete = yield from read_value(reader, raw.append)
    if not complete:
        return None
    try:
        value = json.loads("".join(raw), strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def read_value(reader: Reader, emit: Callable[[str], Any]) -> Steps[bool]:
    """Reads one JSON value as it is written and passes it on piece by piece. False when the text is over before the value is.

    Only brackets and quotes are looked at, so a value that is wrong inside is passed on as wrong as it is.
    """
    first = yield from reader.peek()
    if not first:
        return False
    if first not in '{["':
        while (character := (yield from reader.peek())) and not _SCALAR_END.match(character):
            emit(reader.take(1))
        return bool(character)
    depth, in_string = 0, False
    while True:
        character = yield from reader.peek()
        if not character:
            return False
        if in_string:
            # An escape goes out whole, so that no piece ends between a backslash and its character.
            marker = yield from reader.until(('"', "\\"), emit)
            if marker is None:
                return False
            if marker == "\\":
                character = yield from reader.peek()
                emit("\\" + (reader.take(1) if character else ""))
                continue
            emit(marker)
            in_string = False
        else:
            emit(reader.take(1))
            if character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
        if not in_string and depth <= 0:
            return True
