"""`tpu-serve bench report`: results as charts on one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tpu_serve.config import ConfigError


def add(kinds: Any) -> None:
    """Adds `report` to the benchmarks."""
    parser = kinds.add_parser(
        "report",
        help="charts of result files as one HTML page",
        description="Draws result files of bench serve (latency over throughput, a curve for each --label), prefill, decode and moe (where one way of running "
        "experts becomes faster than another), with their figures as tables. The page is one file and loads nothing.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files, in any order")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.html", help="where the page goes")
    parser.add_argument("--title", default="Benchmarks", metavar="TEXT", help="of the page (default: %(default)s)")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Draws and writes; returns the exit code."""
    file: Path = arguments.output
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"--output {file} cannot be written: it is a folder, or its folder does not exist.")

    from tpu_serve.bench.curves import sections
    from tpu_serve.bench.page import page
    from tpu_serve.bench.result_files import read_documents

    found = sections([(path, document) for path in arguments.files for document in read_documents(path)])
    try:
        file.write_text(page(arguments.title, found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {file} cannot be written: {error.strerror}.") from None
    print(f"wrote {file}", file=sys.stderr)
    return 0
