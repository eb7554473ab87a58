"""What `chat` and `complete` have in common: their options, where questions come from, and how answers are shown while they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from tpu_serve.cli.options import json_object, positive
from tpu_serve.config import ConfigError
from tpu_serve.config.client import DEFAULT_URL, KEY_VARIABLES, client_api_key

if TYPE_CHECKING:
    from tpu_serve.cli.remote import Remote, Stream

ANSWERED, FAILED = 0, 1
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Whatever a model says, it does not steer the terminal.
_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def add_options(parser: argparse.ArgumentParser, subject: str) -> None:
    """Adds what both commands take; `subject` is the metavar of the question."""
    add = parser.add_argument
    add("-q", "--quick", metavar=subject, help="ask this one thing, print the answer and end; - reads standard input")
    add("--url", metavar="URL", default=DEFAULT_URL, help="the server's API (default: %(default)s)")
    add("--model-name", "--model", metavar="NAME", help="name of the model; the server's first one when left out")
    add("--api-key", metavar="KEY", help=f"also read from {' and '.join(KEY_VARIABLES)}")
    add("--max-tokens", metavar="N", type=positive, help="longest answer; what the server does when left out")
    add("--temperature", metavar="T", type=float, help="0 always takes the likeliest token")
    add("--seed", metavar="N", type=int, help="makes random answers repeat")
    add("--extra-body", metavar="JSON", type=json_object, default={}, help="further fields of the request")


def fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a request that the options give.

    Raises:
      ConfigError: they ask for several answers.
    """
    if arguments.extra_body.get("n", 1) != 1:
        raise ConfigError(
            f"--extra-body asks for n={arguments.extra_body['n']} answers, and one is shown: leave n out."
        )
    names = ("max_tokens", "temperature", "seed")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return {**given, **arguments.extra_body}


def converse(arguments: argparse.Namespace, answer: Callable[[Remote, str, str], None]) -> int:
    """Answers one question or as many as come; returns the exit code.

    Args:
      answer: asks the server, given a model's name and a question, and prints what it says.
    """
    from tpu_serve.cli.remote import Refused, Remote

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    remote = Remote(arguments.url, client_api_key(arguments.api_key))
    quick = arguments.quick
    if quick is None and not sys.stdin.isatty():
        quick = "-"
    if quick == "-":
        quick = _read_input()
    try:
        model = arguments.model_name or remote.first_model()
        if quick is not None:
            answer(remote, model, quick)
            return ANSWERED
    except Refused as error:
        say(f"error: {error}")
        return FAILED
    say(f"{model} at {remote.url}; Ctrl-C ends an answer, Ctrl-D the program")
    return _loop(remote, model, answer)


def _loop(remote: Remote, model: str, answer: Callable[[Remote, str, str], None]) -> int:
    from tpu_serve.cli.remote import Refused

    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and its keys
    while True:
        try:
            question = input("> ")
        except EOFError:
            print()
            return ANSWERED
        except KeyboardInterrupt:
            print()
            continue
        if not question.strip():
            continue
        try:
            answer(remote, model, question)
        except KeyboardInterrupt:
            print()
        except (Refused, ConfigError) as error:
            say(f"error: {error}")


def _read_input() -> str:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is not text: {error.reason}.") from None
    text = text.removesuffix("\n")
    if not text:
        raise ConfigError("Standard input is empty: there is nothing to ask.")
    return text


def say(text: str) -> None:
    """A remark that is no part of an answer."""
    sys.stdout.flush()
    print(f"tpu-serve: {text}", file=sys.stderr, flush=True)


def show_ignored(stream: Stream) -> None:
    """Says which fields of a request had no effect."""
    if stream.ignored:
        say(f"the server knows no fields {stream.ignored}: they had no effect")


class Printer:
    """Shows an answer as it comes: on a terminal its reasoning too, dimmed; elsewhere the text and nothing else."""

    def __init__(self, output: TextIO | None = None):
        self._output = output or sys.stdout
        self._is_terminal = self._output.isatty()
        self._is_dim = False
        self._ends_line = True

    def text(self, piece: str) -> None:
        if piece:
            self._dim(False)
            self._write(piece)

    def reasoning(self, piece: str) -> None:
        if piece and self._is_terminal:
            self._dim(True)
            self._write(piece)

    def close(self) -> None:
        """Ends the last line."""
        self._dim(False)
        if not self._ends_line:
            self._output.write("\n")
        self._output.flush()

    def _dim(self, dim: bool) -> None:
        if dim != self._is_dim:
            if not dim and not self._ends_line:
                self._write("\n")
            self._output.write(_DIM if dim else _PLAIN)
            self._is_dim = dim

    def _write(self, piece: str) -> None:
        self._output.write(piece.translate(_UNSAFE) if self._is_terminal else piece)
        self._output.flush()
        self._ends_line = piece.endswith("\n")
