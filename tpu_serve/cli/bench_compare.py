"""`tpu-serve bench compare`: two results side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tpu_serve.cli.options import not_negative


def add(kinds: Any) -> None:
    """Adds `compare` to the benchmarks."""
    parser = kinds.add_parser(
        "compare",
        help="two result files side by side, with a verdict",
        description="Compares two result files of bench serve, throughput, latency, startup, prefill, decode or moe figure by figure: medians, their ratio, and a verdict that "
        "takes the spread of repeated runs into account (--repeat, several results in one file by --append-result, or the iterations of a sweep). Exit code: 0, or 1 "
        "with --fail-if-worse when something got worse; 2 when the two cannot be compared.",
    )
    add = parser.add_argument
    add("before", type=Path, help="result file")
    add("after", type=Path, help="result file that is judged against it")
    add("--threshold", metavar="PERCENT", type=not_negative("percent"), default=5.0,
        help="changes of so many percent mean nothing, even when they repeat (default: %(default)g)")  # fmt: skip
    add("--allow-different", action="store_true", help="compare results of different shapes or settings all the same")
    add("--fail-if-worse", action="store_true", help="exit with 1 when any figure got worse")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; returns the exit code."""
    from tpu_serve.bench.compare import compare

    found = compare(
        arguments.before, arguments.after, arguments.threshold / 100, allows_different=arguments.allow_different
    )
    print(found.text())
    return int(arguments.fail_if_worse and found.num_worse > 0)
