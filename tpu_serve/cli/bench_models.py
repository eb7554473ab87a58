"""`tpu-serve bench models`: what the TPU compiler makes of whole models, without weights and without a TPU."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.options import positive
from tpu_serve.config import ConfigError

if TYPE_CHECKING:
    from tpu_serve.bench.models.cells import Cell
    from tpu_serve.bench.models.journal import Journal
    from tpu_serve.bench.models.programs import Program

EXAMPLE = """\
example, of which an interrupted run goes on where it was:
  tpu-serve bench models --models Qwen3-30B-A3B --cells decode64 prefill2048 --output models.jsonl --resume

The models are Qwen3-30B-A3B, Qwen3.5-397B-A17B-FP8, gemma-4-26B-A4B, gpt-oss-120b and Qwen3-Coder-480B-A35B-FP8.
"""


def add(kinds: Any) -> None:
    models = kinds.add_parser(
        "models",
        help="what the TPU compiler makes of whole models, without a TPU",
        description="Compiles the steps of published models, all layers, ahead of time for named slices, from their config.json alone, and prints "
        "bytes by kind, collectives, seconds to compile, the modelled time of a step beside its bound, and the share of experts, attention and the "
        "rest. A program takes a minute or two of a processor. Nothing is measured on a TPU.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    some = {"nargs": "+", "default": None}
    models.add_argument("--models", metavar="NAME", **some, help="which models (default: all)")
    models.add_argument(
        "--cells",
        metavar="STEP",
        **some,
        help="which steps: decode8, decode64, decode256, prefill2048, prefill8192 (default: all)",
    )
    models.add_argument(
        "--slices", metavar="SLICE", **some, help="v6e:2x4, tpu7x:2x2x1, tpu7x:2x2x2 (default: those of each model)"
    )
    models.add_argument(
        "--timeout", metavar="S", type=positive, default=7200, help="seconds for one program (default: %(default)s)"
    )
    models.add_argument(
        "--jobs", metavar="N", type=positive, default=1, help="compilers at a time (default: %(default)s)"
    )
    models.add_argument(
        "--output",
        type=Path,
        metavar="FILE.jsonl",
        help="everything that was found, a program's as soon as it is done; the rows of the tables are written beside it as FILE.json",
    )
    models.add_argument(
        "--page", type=Path, metavar="FILE.md", help="write the tables as a page, as docs/tpu_programs.md is"
    )
    models.add_argument(
        "--resume",
        action="store_true",
        help="continue the FILE of --output, if it is there: programs that it has from the same versions are not compiled again, unless they failed",
    )
    models.set_defaults(run=run, parser=models)


def run(arguments: argparse.Namespace) -> int:
    """Compiles the cells asked for and prints tables; 1 when a program did not compile."""
    file: Path | None = arguments.output
    if file is not None:
        _check_writable("--output", file, "models.jsonl", is_good=file.suffix not in ("", ".json", ".md"))
    if arguments.page is not None:
        _check_writable("--page", arguments.page, "models.md", is_good=arguments.page.suffix == ".md")
    if arguments.resume and file is None:
        raise ConfigError("--resume needs the --output FILE that is to be continued.")

    from tpu_serve.bench.journal_file import versions
    from tpu_serve.bench.models import table
    from tpu_serve.bench.models.cells import select
    from tpu_serve.bench.models.journal import Journal
    from tpu_serve.bench.models.programs import COMPILED

    cells = select(arguments.models, arguments.cells, arguments.slices)
    journal = None if file is None else Journal(file, cells, resume=arguments.resume)
    programs: dict[Cell, Program] = {} if journal is None else dict(journal.kept)
    try:
        _compile(cells, programs, journal, arguments)
    finally:
        if file is not None:
            rows = [programs[cell].as_json() for cell in cells if cell in programs]
            whole = {"command": _command(arguments), "versions": versions(), "note": table.NOTE, "rows": rows}
            _write("--output", file.with_suffix(".json"), json.dumps(whole, indent=1) + "\n")
        if arguments.page is not None:
            _write("--page", arguments.page, table.page(cells, programs, _command(arguments), versions()))
    print(table.text(cells, programs))
    return int(any(program.outcome != COMPILED for program in programs.values()))


def _check_writable(flag: str, file: Path, example: str, *, is_good: bool) -> None:
    if file.is_dir() or not file.parent.is_dir() or not is_good:
        raise ConfigError(f"{flag} {file} cannot be written: name a file as in {example}, in a folder that exists.")


def _command(arguments: argparse.Namespace) -> str:
    """What makes the same tables again, wherever it is run and whatever is there already."""
    words = ["tpu-serve", "bench", "models"]
    for flag in ("models", "cells", "slices"):
        if given := getattr(arguments, flag):
            words += [f"--{flag}", *given]
    if arguments.page is not None:
        words += ["--page", str(arguments.page)]
    return shlex.join(words)


def _write(flag: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {file} cannot be written: {error.strerror}.") from None


def _compile(
    cells: Sequence[Cell], programs: dict[Cell, Program], journal: Journal | None, arguments: argparse.Namespace
) -> None:
    """Adds the programs that are missing. Each is told, and written to the journal, as it is ready."""
    from tqdm import tqdm

    from tpu_serve.bench.models.programs import sweep
    from tpu_serve.bench.models.table import short

    missing = [cell for cell in cells if cell not in programs]
    with ExitStack() as stack:
        if journal is not None:
            stack.enter_context(journal)
        if programs:
            print(f"tpu-serve: {len(programs)} of {len(cells)} programs are in the file", file=sys.stderr)
        progress = stack.enter_context(tqdm(total=len(cells), initial=len(programs), unit="program", disable=None))
        for program in stack.enter_context(closing(sweep(missing, arguments.timeout, arguments.jobs))):
            if journal is not None:
                journal.add(program)
            programs[program.cell] = program
            tqdm.write(short(program), file=sys.stderr)
            progress.update()
