"""`tpu-serve COMMAND …`. Commands import what is heavy only when they run, so that help and errors come at once."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from tpu_serve import __version__
from tpu_serve.cli import batch, bench, chat, check, compile, complete, convert, doctor, plan, serve, tune
from tpu_serve.cli.parser import Parser
from tpu_serve.cli.terminated import EXIT_CODE, Terminated
from tpu_serve.config import ConfigError

FAILED_TO_RUN = 2
INTERRUPTED = 130
COMMANDS = (serve, chat, complete, batch, check, compile, doctor, bench, plan, tune, convert)
"""Modules with `register(subparsers)`, which sets `run(arguments) -> exit code` on its parser."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 when it could not run (one line on stderr says why), 130 when interrupted, 143 when
    terminated."""
    try:
        arguments = _parser().read(sys.argv[1:] if argv is None else argv)
        code: int = arguments.run(arguments)
        return code
    except ConfigError as error:
        print(f"tpu-serve: error: {' '.join(str(error).split())}", file=sys.stderr)
        return FAILED_TO_RUN
    except BrokenPipeError:  # who reads has seen enough
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        print(f"tpu-serve: error: {error.strerror}.", file=sys.stderr)
        return FAILED_TO_RUN
    except Terminated:
        print("tpu-serve: terminated", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print("tpu-serve: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as finished:  # --help and --version
        return finished.code if isinstance(finished.code, int) else 0


def console() -> NoReturn:
    """What the installed command runs: `main`, and the end of the process, at once also where programs are being compiled for a start that
    has failed."""
    code = main()
    from tpu_serve.runner import background

    if background.is_running():
        background.leave(code)
    sys.exit(code)


def _drop_output() -> None:
    """Lets what is still buffered for standard output go nowhere: the interpreter would fail on it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(prog="tpu-serve", description="Inference server for mixture-of-experts language models on TPUs.")
    parser.add_argument("-v", "--version", action=_Version, help="show the version")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return parser


class _Version(argparse.Action):
    """Prints the version, which takes a moment to find out."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str):
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"tpu-serve {__version__}")
        parser.exit()


if __name__ == "__main__":
    console()
