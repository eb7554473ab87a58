"""The argument parser of every command: one-line errors with a suggestion, `-` and `_` alike, `--help=WORD`, `--config FILE`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from tpu_serve.config import ConfigError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError` where the other would print its usage and exit."""

    def __init__(self, **settings: Any):
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", _Formatter)
        super().__init__(add_help=False, **settings)
        self.add_argument("-h", "--help", action=_Help, help="show this text; --help=WORD only options that hold WORD")

    def add_config_option(self) -> None:
        """Adds `--config FILE`, whose keys are the other options; what stands on the command line wins."""
        self.add_argument(
            "--config",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="YAML file with options, named as here without the dashes; the command line wins over it",
        )

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
            near = difflib.get_close_matches(flag, _shown_flags(getattr(namespace, "parser", self)), n=1)
            raise ConfigError(f"unknown flag {flag}{f'; did you mean {near[0]}?' if near else ''}")
        return namespace

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse`, with the options of a --config file below those of the command line."""
        words = _without_truth(list(sys.argv[1:] if args is None else args), self)
        given = argparse.Namespace()
        if any("--config" in action.option_strings for action in self._actions):
            for path in _config_files(words):
                from tpu_serve.cli.config_file import read_options

                for name, value in vars(read_options(path, self)).items():
                    setattr(given, name, value)
        for action in self._actions:
            if hasattr(given, action.dest):
                # Without a default, what is missing afterwards is what the command line did not say.
                action.required, action.default = False, argparse.SUPPRESS
        namespace, unknown = super().parse_known_args(words, namespace)
        _fill(namespace, given)
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        known = ", ".join(str(choice) for choice in choices)
        if isinstance(action, argparse._SubParsersAction):
            raise ConfigError(f"unknown command {value!r}; {guess}there are {known} (see {self.prog} --help)")
        hint = getattr(action, "value_hints", {}).get(value)
        said = f"{value}: {hint}" if hint else f"invalid choice: {value!r}; {guess}there are {known}"
        raise argparse.ArgumentError(action, said)


def _fill(namespace: argparse.Namespace, given: argparse.Namespace) -> None:
    """Lays what a file says under what the command line says."""
    for name, value in vars(given).items():
        if name == "notes":
            namespace.notes = [*value, *getattr(namespace, "notes", [])]
        elif not hasattr(namespace, name) and not (name == "model" and hasattr(namespace, "positional_model")):
            setattr(namespace, name, value)


def _without_truth(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words with `--switch=true` and `--switch=false` as `--switch` and `--no-switch`."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    end = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:end]):
        flag, _, value = word.partition("=")
        action = actions.get(flag)
        if action is None or action.nargs != 0 or value.lower() not in ("true", "false"):
            continue
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        if value.lower() == "false" and opposite not in actions:
            raise ConfigError(f"{flag} is a switch: leave it out to have it off.")
        words[place] = flag if value.lower() == "true" else opposite
    return words


def _config_files(words: Sequence[str]) -> Iterator[str]:
    for place, word in enumerate(words):
        if word == "--":
            return
        if word.startswith("--config="):
            yield word.partition("=")[2]
        elif word == "--config" and place + 1 < len(words):
            yield words[place + 1]


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


def _shown_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Flags that help text shows: one that is hidden is known for the sake of other programs' users."""
    return [
        flag for action in parser._actions if action.help is not argparse.SUPPRESS for flag in action.option_strings
    ]


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
    if action.help is argparse.SUPPRESS:
        return ""
    return " ".join([*action.option_strings, action.help or ""]).lower().replace("_", "-")
