"""`--config FILE`: options from a YAML file, read as if they stood on the command line before everything that does."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tpu_serve.cli.foreign import Elsewhere
from tpu_serve.cli.parser import Parser
from tpu_serve.option import ConfigError

NOT_IN_A_FILE = ("--config", "--help")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One key of the file and what it holds: a switch, the text of a value, several, or None for nothing at all."""

    key: str
    line: int
    value: bool | str | list[str] | None
    text: str


def read_options(path: str, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the keys of a file say of a command's options. Keys are flags without their dashes, spelled with - or _.

    Args:
      parser: of the command; its actions say what a key may hold.

    Raises:
      ConfigError: the file cannot be read, or one of its lines makes no sense; the message names the line.
    """
    flags = {flag: action for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    namespace, seen = argparse.Namespace(), dict[str, int]()
    for entry in _entries(path):
        where = f"{path}, line {entry.line}"
        flag = f"--{entry.key.replace('_', '-')}"
        action = flags.get(flag)
        if action is None or flag in NOT_IN_A_FILE:
            raise ConfigError(f"{where}: {_unknown(entry.key, action, flags)}")
        if flag in seen:
            raise ConfigError(f"{where}: {entry.key} is in line {seen[flag]} already.")
        seen[flag] = entry.line
        try:
            _read_alone(_words(entry, flag, action, flags), action, namespace, flags)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return namespace


def _unknown(key: str, action: argparse.Action | None, flags: dict[str, argparse.Action]) -> str:
    if action is not None:
        return f"{key} is for the command line only."
    if key.startswith("-"):
        return f"write {key.lstrip('-')} without dashes in front."
    near = difflib.get_close_matches(f"--{key.replace('_', '-')}", flags, n=1)
    return f"unknown option {key}{f'; did you mean {near[0][2:]}?' if near else '.'}"


def _words(entry: _Entry, flag: str, action: argparse.Action, flags: dict[str, argparse.Action]) -> list[str]:
    """The command line that says the same."""
    value = entry.value
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{entry.key} is true or false, got {entry.text!r}.")
        if value:
            return [flag]
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return [opposite] if opposite in flags else []
    if isinstance(value, list):
        if action.nargs == "+" and type(action) is argparse._StoreAction:
            return [flag, *value]
        if not isinstance(action, argparse._AppendAction | argparse._ExtendAction | Elsewhere):
            raise ConfigError(f"{entry.key} takes one value, not a list.")
        return [f"{flag}={text}" for text in value]
    return [f"{flag}={entry.text}"]


def _read_alone(
    words: list[str],
    action: argparse.Action,
    namespace: argparse.Namespace,
    flags: dict[str, argparse.Action],
) -> None:
    """Parses the words of one key with the actions that they may name and no other."""
    reader = _Reader(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for one in dict.fromkeys([action, *(flags[word] for word in words if word in flags)]):
        reader._add_action(one)
    found = reader.parse_args(words)
    for name, value in vars(found).items():
        setattr(namespace, name, [*getattr(namespace, name, []), *value] if name == "notes" else value)


class _Reader(argparse.ArgumentParser):
    _check_value = Parser._check_value

    def error(self, message: str) -> Any:
        raise ConfigError(message)


def _entries(path: str) -> Iterator[_Entry]:
    """The keys of a file in their order."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ConfigError(f"--config {path} is not a text file in UTF-8.") from None
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: the file must hold option names with their values, as in `port: 8000`.")
        for key, value in root.value:
            yield _entry(path, loader, key, value)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: this is not YAML: {error.problem}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: this is not YAML: {' '.join(str(error).split())}.") from None
    finally:
        if loader is not None:
            loader.dispose()


def _entry(path: str, loader: yaml.SafeLoader, key: yaml.Node, node: yaml.Node) -> _Entry:
    line = key.start_mark.line + 1
    if not isinstance(key, yaml.ScalarNode):
        raise ConfigError(f"{path}, line {line}: an option's name must be a word.")
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ConfigError(f"{path}, line {line}: {key.value} may hold a list of single values only.")
        texts = [item.value for item in node.value]
        return _Entry(key.value, line, texts, f"a list of {len(texts)}")
    value = loader.construct_object(node, deep=True)
    if isinstance(node, yaml.MappingNode):
        try:
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {line}: {key.value} cannot be written as JSON: {error}.") from None
        return _Entry(key.value, line, text, text)
    if value is None:
        return _Entry(key.value, line, None, "")
    # The text and not the value: YAML takes off, no, 1:30 and 1e3 for something else, and the option's own reader knows what they are.
    return _Entry(key.value, line, value if isinstance(value, bool) else node.value, node.value)
