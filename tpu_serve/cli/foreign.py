"""Flags of vLLM and sglang-jax that are no options here: each one is understood, and done, explained or refused with what to do instead.

They are hidden from the help text. A flag that has become an option of ours drops out of here by itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.option import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What becomes of a flag that is not ours.

    Attributes:
      flags: its spellings.
      says: what it means here and what to do, a clause that follows the flag.
      takes: how many words follow it, as `nargs` of argparse; 0 is a switch.
      done: pattern of the values (lower case) that ask for what is always done; of a switch "" if that is true of it.
      note: it is accepted, and `says` is logged; otherwise it is refused with `says`.
      sets: options of ours that the flag gives a value to.
    """

    flags: tuple[str, ...]
    says: str = ""
    takes: int | str = 1
    done: str | None = None
    note: bool = False
    sets: Mapping[str, Any] = field(default_factory=dict)


def add_foreign_flags(parser: argparse.ArgumentParser, table: Sequence[Foreign]) -> None:
    """Adds the flags of a table that the parser does not know yet, hidden. Call it after all options were added."""
    known = {flag for action in parser._actions for flag in action.option_strings}
    for row in table:
        flags = [flag for flag in row.flags if flag not in known]
        if flags:
            parser.add_argument(*flags, action=_Action, row=row)


class _Action(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, row: Foreign):
        super().__init__(
            option_strings,
            "notes",
            nargs=None if row.takes == 1 else row.takes,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
        self._row = row

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        row, flag = self._row, option_string or self.option_strings[0]
        words = [values] if isinstance(values, str) else list(values or ())
        if row.done is not None and re.fullmatch(row.done, " ".join(words).strip().lower()):
            return
        shown = " ".join([flag, *words])
        if row.sets:
            for name, value in row.sets.items():
                setattr(namespace, name, value)
        elif row.note:
            add_note(namespace, f"{shown} {row.says}.")
        else:
            raise ConfigError(f"{shown} {row.says}.")


class Elsewhere(argparse.Action):
    """An option of the HTTP server on a command that has none: accepted, so that the flags of `serve` can be used as they are, and logged."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        add_note(namespace, f"{flag} is about the HTTP server and changes nothing here.")


def add_note(namespace: argparse.Namespace, note: str) -> None:
    """Keeps a remark on the command line, to be logged when the command runs."""
    namespace.notes = [*getattr(namespace, "notes", []), note]
