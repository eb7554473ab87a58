"""`tpu-serve complete`: a running server goes on with a text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.ask import Printer, add_options, converse, fields, say, show_ignored

if TYPE_CHECKING:
    from tpu_serve.cli.remote import Remote


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "complete",
        help="let a running server go on with a text",
        description="Lets the model of a running server go on with a text, and shows what comes. Standard input that is no terminal is one text. "
        "Exit code: 0 answered, 1 the server refused, 2 it cannot be reached.",
    )
    add_options(parser, "PROMPT")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Completes texts until the input ends; returns the exit code."""

    def answer(remote: Remote, model: str, question: str) -> None:
        _show(remote, {"model": model, "prompt": question, **fields(arguments)})

    return converse(arguments, answer)


def _show(remote: Remote, body: dict[str, Any]) -> None:
    printer, reason = Printer(), None
    try:
        with remote.stream("/completions", body) as stream:
            show_ignored(stream)
            for chunk in stream.chunks:
                for choice in chunk.get("choices") or ():
                    printer.text(choice.get("text") or "")
                    reason = choice.get("finish_reason") or reason
    finally:
        printer.close()
    if reason == "length":
        say("the text was cut: --max-tokens N makes it longer, up to the model's limit")
