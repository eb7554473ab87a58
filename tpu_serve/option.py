"""What an option is: a dataclass field with its help text, and the checks that options have in common."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import field
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A configuration that cannot work. The message holds the number that did not fit and the option that would."""


def option(
    default: Any, help: str, *, aliases: tuple[str, ...] = (), choices: tuple[str, ...] = (), metavar: str = ""
) -> Any:
    """A dataclass field that the command line can show: `aliases` are further flag names, spelled as flags."""
    metadata = {"help": help, "aliases": aliases, "choices": choices, "metavar": metavar}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_choices(part: Any) -> None:
    for item in dataclasses.fields(part):
        choices = item.metadata.get("choices")
        if choices and getattr(part, item.name) not in (*choices, item.default):
            raise ConfigError(
                f"--{item.name.replace('_', '-')} must be one of {', '.join(choices)}, got {getattr(part, item.name)!r}."
            )


def check_types(part: Any) -> None:
    """Python callers bring values of any type; the command line has parsed its own."""
    for name, hint in get_type_hints(type(part)).items():
        value = getattr(part, name)
        kinds = [get_origin(kind) or kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
        if float in kinds:
            kinds.append(int)
        # bool is an int to isinstance, never to an option.
        if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be of type {hint if isinstance(hint, UnionType) else hint.__name__}, got {value!r}."
            )


def check_at_least(part: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(part, name)
        if value is not None and value < minimum:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {minimum}, got {value}.")


_SUFFIXES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_count(text: str) -> int:
    """Reads `4096`, `32k`, `1m` or `2g` (binary multiples).

    Raises:
      ConfigError: the text is not such a number.
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(?:i?b)?", text.strip().lower(), re.ASCII)
    if not match:
        raise ConfigError(f"{text!r} is not a number such as 4096, 32k or 2g.")
    return int(float(match[1]) * _SUFFIXES[match[2]])
