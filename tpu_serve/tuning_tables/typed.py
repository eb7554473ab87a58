"""Frozen dataclasses of plain fields from JSON objects and back, with errors that name the field."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Malformed(ValueError):
    """JSON that is not what its place asks for; the message names the place."""


@cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Type and whether it must be given, of each field."""
    hints = typing.get_type_hints(cls)
    return {
        item.name: (
            hints[item.name],
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING,
        )
        for item in dataclasses.fields(cls)
    }


def from_json(cls: type[T], value: Any, where: str) -> T:
    """An instance of a dataclass whose fields are plain values, dataclasses, or either or None.

    Args:
      where: what the value is and where it stands, for messages.

    Raises:
      Malformed: it is not an object, a field is unknown, missing or of another type, or the class refuses the values.
    """
    if not isinstance(value, dict):
        raise Malformed(f"{where} must be an object, not {_shown(value)}")
    known = _fields(cast(Any, cls))
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise Malformed(f"{where} has the unknown field {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    given: dict[str, Any] = {}
    for name, (kind, needed) in known.items():
        if name in value:
            given[name] = _read(kind, value[name], f"{where}: {name}")
        elif needed:
            raise Malformed(f"{where} lacks the field {name!r}")
    try:
        return cls(**given)
    except ValueError as error:
        raise Malformed(f"{where}: {error}") from None


def to_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, or have none, in order."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(value):
        held = getattr(value, item.name)
        if item.default is dataclasses.MISSING or held != item.default:
            found[item.name] = to_json(held) if dataclasses.is_dataclass(held) else held
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(option, type) and isinstance(value, Mapping):
            return from_json(option, value, where)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if option is float and is_number and abs(value) < 1e300:  # neither NaN nor endless nor too large
            return float(value)
        if isinstance(option, type) and type(value) is option:  # bool is an int to isinstance
            return value
    names = " or ".join("null" if option is type(None) else option.__name__ for option in options)
    raise Malformed(f"{where} must be {names}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
