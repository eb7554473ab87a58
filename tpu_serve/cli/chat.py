"""`tpu-serve chat`: a conversation with a running server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.ask import Printer, add_options, converse, fields, say, show_ignored

if TYPE_CHECKING:
    from tpu_serve.cli.remote import Remote


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a running server",
        description="Talks to the model of a running server, and shows its answers as they come. Standard input that is no terminal is one message. "
        "Exit code: 0 answered, 1 the server refused, 2 it cannot be reached.",
    )
    add_options(parser, "MESSAGE")
    parser.add_argument("--system-prompt", metavar="TEXT", help="goes before the conversation")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Talks until its input ends; returns the exit code."""
    messages: list[dict[str, str]] = []
    if arguments.system_prompt is not None:
        messages.append({"role": "system", "content": arguments.system_prompt})

    def answer(remote: Remote, model: str, question: str) -> None:
        asked = [*messages, {"role": "user", "content": question}]
        body = {"model": model, "messages": asked, **fields(arguments)}
        said: list[str] = []
        try:
            _show(remote, body, said)
        finally:
            if text := "".join(said):  # what was heard of an answer counts, also when Ctrl-C ended it
                messages[:] = [*asked, {"role": "assistant", "content": text}]

    return converse(arguments, answer)


def _show(remote: Remote, body: dict[str, Any], said: list[str]) -> None:
    """Prints an answer and keeps its text in `said`."""
    printer, reason = Printer(), None
    try:
        with remote.stream("/chat/completions", body) as stream:
            show_ignored(stream)
            for chunk in stream.chunks:
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    printer.reasoning(delta.get("reasoning") or delta.get("reasoning_content") or "")
                    if text := delta.get("content"):
                        said.append(text)
                        printer.text(text)
                    reason = choice.get("finish_reason") or reason
    finally:
        printer.close()
    if reason == "length":
        say("the answer was cut: --max-tokens or the model's limit was reached")
