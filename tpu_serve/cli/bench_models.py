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
    from tpu_serve.bench.models.cells import Job
    from tpu_serve.bench.models.journal import Journal
    from tpu_serve.bench.models.rows import Program, Row

EXAMPLE = """\
example, of which an interrupted run goes on where it was:
  tpu-serve bench models --models Qwen3-30B-A3B --cells decode64 prefill2048 --output models.jsonl --resume

The models are Qwen3-30B-A3B, Qwen3.5-397B-A17B-FP8, gemma-4-26B-A4B, gpt-oss-120b and Qwen3-Coder-480B-A35B-FP8.
"""


def add(kinds: Any) -> None:
    models = kinds.add_parser(
        "models",
        help="what the TPU compiler makes of whole models, without a TPU",
        description="Compiles the steps of published models ahead of time for named slices, from their config.json alone, and prints bytes by kind, "
        "collectives, seconds to compile, the modelled time of a step beside its bound, and the share of experts, attention and the rest. All layers "
        "are calculated from programs with a few of each kind unless --whole. Nothing is measured on a TPU.",
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
        "--layers",
        metavar="N",
        type=positive,
        default=1,
        help="layers of each kind in the smallest program; others have one more of a kind (default: %(default)s)",
    )
    models.add_argument("--whole", action="store_true", help="compile all layers, which takes minutes to hours")
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
        help="everything that was found, a program's as soon as it is done; the tables are written beside it as FILE.json and FILE.md",
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
    if file is not None and (file.is_dir() or not file.parent.is_dir() or file.suffix in ("", ".json", ".md")):
        raise ConfigError(
            f"--output {file} cannot be written: name a file as in models.jsonl, in a folder that exists."
        )
    if arguments.resume and file is None:
        raise ConfigError("--resume needs the --output FILE that is to be continued.")
    if arguments.whole and arguments.layers != 1:
        raise ConfigError(
            "--layers says how many layers are compiled, and --whole that all are: leave one of them out."
        )

    from tpu_serve.bench.models import cells, table
    from tpu_serve.bench.models.journal import Journal
    from tpu_serve.bench.models.rows import COMPILED, row_of

    wanted = cells.select(arguments.models, arguments.cells, arguments.slices)
    jobs = {cell: cells.jobs(cell, arguments.layers, is_whole=arguments.whole) for cell in wanted}
    every = [job for some in jobs.values() for job in some]
    journal = None if file is None else Journal(file, every, resume=arguments.resume)
    programs: dict[Job, Program] = {} if journal is None else dict(journal.kept)
    try:
        _compile(every, programs, journal, arguments)
    finally:
        rows = [row_of(cell, jobs[cell], programs) for cell in wanted]
        if file is not None:
            _write(file, rows)
    print(table.text(rows))
    return int(any(row.outcome != COMPILED for row in rows))


def _compile(
    jobs: Sequence[Job], programs: dict[Job, Program], journal: Journal | None, arguments: argparse.Namespace
) -> None:
    """Adds the programs that are missing. Each is told, and written to the journal, as it is ready."""
    from tqdm import tqdm

    from tpu_serve.bench.models.rows import sweep
    from tpu_serve.bench.models.table import short

    missing = [job for job in jobs if job not in programs]
    with ExitStack() as stack:
        if journal is not None:
            stack.enter_context(journal)
        if programs:
            print(f"tpu-serve: {len(programs)} of {len(jobs)} programs are in the file", file=sys.stderr)
        progress = stack.enter_context(tqdm(total=len(jobs), initial=len(programs), unit="program", disable=None))
        for program in stack.enter_context(closing(sweep(missing, arguments.timeout, arguments.jobs))):
            if journal is not None:
                journal.add(program)
            programs[program.job] = program
            tqdm.write(short(program), file=sys.stderr)
            progress.update()


def _write(file: Path, rows: Sequence[Row]) -> None:
    """The tables beside the journal."""
    from tpu_serve.bench.journal_file import versions
    from tpu_serve.bench.models import table

    command = shlex.join(["tpu-serve", *sys.argv[1:]])
    whole = {"command": command, "versions": versions(), "note": table.NOTE, "rows": [row.as_json() for row in rows]}
    try:
        file.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
        file.with_suffix(".md").write_text(table.markdown(rows, command))
    except OSError as error:
        raise ConfigError(f"--output {file}: the tables beside it cannot be written: {error.strerror}.") from None
