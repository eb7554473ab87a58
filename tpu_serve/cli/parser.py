"""The argument parser of every command: one-line errors with a suggestion, `-` and `_` alike, `--help=WORD`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from tpu_serve.config import ConfigError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError` where the other would print its usage and exit."""

    def __init__(self, **settings: Any):
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", _Formatter)
        super().__init__(add_help=False, **settings)
        self.add_argument("-h", "--help", action=_Help, help="show this text; --help=WORD only options that hold WORD")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses a command line.

        Raises:
          ConfigError: it makes no sense; an unknown flag comes with the nearest known one.
        """
        namespace, unknown = self.parse_known_args(_normalised(arguments))
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), None)
            if flag is None:
                raise ConfigError(f"unexpected argument {unknown[0]!r}")
            flag = flag.partition("=")[0]
            near = difflib.get_close_matches(flag, _flags(getattr(namespace, "parser", self)), n=1)
            raise ConfigError(f"unknown flag {flag}{f'; did you mean {near[0]}?' if near else ''}")
        return namespace


def _normalised(arguments: Sequence[str]) -> list[str]:
    """The words with every `--flag_name` spelled with dashes, up to a plain `--`; words after a plain `--help` are dropped."""
    words: list[str] = []
    for place, word in enumerate(arguments):
        if word == "--":
            return [*words, *arguments[place:]]
        name, equals, value = word.partition("=")
        words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
        if word in ("-h", "--help"):
            return words
    return words


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


class _Formatter(argparse.HelpFormatter):
    """Wide enough that most options take one line of help."""

    def __init__(self, prog: str, **settings: Any):
        super().__init__(prog, **{"max_help_position": 36, **settings})


class _Help(argparse.Action):
    """Prints the whole help, or only the options whose flags or help hold a word."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any):
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, nargs="?", help=settings["help"])
        self.metavar = "WORD"

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        if values is None:
            parser.print_help()
            parser.exit()
        word = values.lower().replace("_", "-")
        formatter = parser._get_formatter()
        for group in parser._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments([action for action in group._group_actions if word in _searched(action)])
            formatter.end_section()
        print(formatter.format_help() or f"No option of {parser.prog} holds {values!r}.\n", end="")
        parser.exit()


def _searched(action: argparse.Action) -> str:
    return " ".join([*action.option_strings, action.help or ""]).lower().replace("_", "-")
