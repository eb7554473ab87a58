"""Command line flags, made from the declaration in `tpu_serve.config`: an option added there appears here by itself.

Only flags that the user gave reach the configuration, so that defaults live in one place.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

from tpu_serve.cli.foreign import Elsewhere, add_foreign_flags
from tpu_serve.cli.foreign_table import ENGINE_FLAGS, SERVER_FLAGS, VALUE_HINTS
from tpu_serve.cli.parser import Parser
from tpu_serve.config import ConfigError, EngineConfig, ServerConfig, engine_options
from tpu_serve.config.engine import LONGEST_THAT_FITS
from tpu_serve.option import parse_count

logger = logging.getLogger(__name__)

SIZES = frozenset(
    {"max_model_len", "max_num_batched_tokens", "max_num_queued_tokens", "kv_cache_memory_bytes", "max_request_bytes"}
)
"""Options that take suffixes, as in 32k."""
REPEATED = frozenset({"api_key"})
"""Options that take one value at a time and may be given again; other lists take all their values at once."""

_PART_TITLES = {
    "model": "model",
    "moe": "mixture of experts",
    "cache": "KV cache",
    "attention": "attention",
    "scheduler": "scheduling",
    "sampling": "sampling",
    "parallel": "several devices",
    "compile": "compiled programs",
}
_POSITIONAL_MODEL = "positional_model"


def add_engine_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds MODEL and a flag for every engine option except those named in `without`."""
    parser.add_argument(
        _POSITIONAL_MODEL,
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="a Hugging Face folder or hub id; the embedded model when left out",
    )
    groups: dict[str, Any] = {}
    defaults = EngineConfig()
    hints = _type_hints(*(type(getattr(defaults, part)) for part in _PART_TITLES))
    for part, name, item in engine_options():
        if part not in groups:
            groups[part] = parser.add_argument_group(_PART_TITLES.get(part, part))
        if name not in without:
            _add_flag(groups[part], name, item, hints[name])


def add_server_options(parser: argparse.ArgumentParser, *, only: Collection[str] | None = None) -> None:
    """Adds a flag for every option of the server, or for those named in `only`."""
    group = parser.add_argument_group("server" if only is None else "requests")
    hints = _type_hints(ServerConfig)
    for item in dataclasses.fields(ServerConfig):
        if only is None or item.name in only:
            _add_flag(group, item.name, item, hints[item.name])


def add_others(parser: Parser) -> None:
    """Adds --config and, hidden, the flags of other programs and those of the HTTP server that the command lacks. Call it last."""
    parser.add_config_option()
    known = {flag for action in parser._actions for flag in action.option_strings}
    for item in dataclasses.fields(ServerConfig):
        if _spelled(item.name) not in known:
            nargs = {bool: 0, tuple: "+"}.get(typing.get_origin(hint := _type_hints(ServerConfig)[item.name]) or hint)
            flags = [_spelled(item.name), *([f"--no-{_spelled(item.name)[2:]}"] if nargs == 0 else [])]
            settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS, "nargs": nargs}
            parser.add_argument(*flags, *item.metadata["aliases"], action=Elsewhere, dest="notes", **settings)
    add_foreign_flags(parser, ENGINE_FLAGS)
    add_foreign_flags(parser, SERVER_FLAGS)


def log_notes(arguments: argparse.Namespace) -> None:
    """Logs what flags of other programs mean here, each once."""
    for note in dict.fromkeys(getattr(arguments, "notes", ())):
        logger.warning("%s", note)


def engine_config(arguments: argparse.Namespace, **forced: Any) -> EngineConfig:
    """The engine configuration that a command line asked for; `forced` options win.

    Raises:
      ConfigError: a value is impossible, or the model is named twice.
    """
    given = {name: getattr(arguments, name) for _, name, _ in engine_options() if hasattr(arguments, name)}
    positional = getattr(arguments, _POSITIONAL_MODEL, None)
    if positional is not None:
        if given.get("model", positional) != positional:
            raise ConfigError(f"The model is named twice: {positional!r} and --model {given['model']!r}.")
        given["model"] = positional
    return EngineConfig.from_options(**{**given, **forced})


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """The server configuration that a command line asked for.

    Raises:
      ConfigError: a value is impossible.
    """
    values: dict[str, Any] = {}
    for item in dataclasses.fields(ServerConfig):
        if hasattr(arguments, item.name):
            value = getattr(arguments, item.name)
            values[item.name] = tuple(value) if isinstance(value, list) else value
    return ServerConfig(**values)


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def not_negative(unit: str) -> Callable[[str], float]:
    """An argparse type: a finite number of at least 0, of that unit."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit}")
        return value

    return read


def _type_hints(*classes: type) -> dict[str, Any]:
    return {name: hint for cls in classes for name, hint in _type_hints_of(cls).items()}


@functools.cache
def _type_hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _add_flag(group: Any, name: str, item: dataclasses.Field[Any], hint: Any) -> None:
    metadata = item.metadata
    flags = [_spelled(name), *metadata["aliases"]]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(item)}
    if hint is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
        return
    if metadata["choices"]:
        settings["choices"] = metadata["choices"]
    else:
        settings["metavar"] = metadata["metavar"] or _metavar(name)
        settings["type"] = _reader(name, hint)
    if typing.get_origin(hint) is tuple:
        settings.update({"action": "append"} if name in REPEATED else {"action": _Extend, "nargs": "+"})
    group.add_argument(*flags, **settings).value_hints = VALUE_HINTS.get(name, {})


class _Extend(argparse._ExtendAction):
    """Takes several words, or a JSON list of them in one word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        words: list[Any] = []
        for value in values:
            words += _json_list(value) if isinstance(value, str) and value.startswith("[") else [value]
        super().__call__(parser, namespace, words, option_string)


def _json_list(text: str) -> list[str]:
    try:
        values = json.loads(text)
    except ValueError:
        return [text]
    return values if all(isinstance(value, str) for value in values) else [text]


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(name: str) -> str:
    return "SIZE" if name in SIZES else name.rsplit("_", 1)[-1].upper()


def _help(item: dataclasses.Field[Any]) -> str:
    text = item.metadata["help"].replace("%", "%%")
    default = item.default
    if default is dataclasses.MISSING or default is None or default in ("", ()):
        return text  # the text itself says what happens when it is left out
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    if isinstance(default, tuple):
        shown = " ".join(map(str, default))
    return f"{text} (default: {shown})"


def _reader(name: str, hint: Any) -> Callable[[str], Any]:
    """What turns the text of a flag into a value (into one element, for a list)."""
    if name == "max_model_len":
        return _length
    if name in SIZES:
        return _size
    readers: dict[type, Callable[[str], Any]] = {int: _integer, float: _number, str: str, dict: json_object}
    if typing.get_origin(hint) in (tuple, types.UnionType):  # tuple[int, ...] and `int | None`
        hint = typing.get_args(hint)[0]
    return readers[typing.get_origin(hint) or hint]


def _size(text: str) -> int:
    try:
        return parse_count(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None


def _length(text: str) -> int:
    return LONGEST_THAT_FITS if text.lower() in ("auto", str(LONGEST_THAT_FITS)) else _size(text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
