"""`tpu-serve doctor`: what this machine has, and what on it would keep the server from working."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from tpu_serve.config import CompileOptions, ServerConfig

if TYPE_CHECKING:
    from tpu_serve.cli.finding import Finding

WORKS, DOES_NOT_WORK = 0, 1
_MARKS = {"ok": " ", "hint": "?", "problem": "!"}
_WIDTH = 16


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        aliases=["collect-env"],
        help="whether this machine can serve, for bug reports too",
        description="Shows versions, devices, memory, folders, limits and the clock, and says what to do about each that is wrong. It starts no server and reads no "
        "weights. Keys are not shown. Exit code: 0 all is well or merely could be better, 1 something will not work.",
    )
    add = parser.add_argument
    add("--host", default=ServerConfig.host, metavar="HOST", help="address to try (default: %(default)s)")
    add("--port", default=ServerConfig.port, metavar="PORT", type=int, help="port to try (default: %(default)s)")
    add("--compile-cache-dir", metavar="DIR", help="folder of compiled programs, when it is not the usual one")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found; returns the exit code."""
    from tpu_serve.cli.doctor_checks import all_checks

    folder = CompileOptions(compile_cache_dir=arguments.compile_cache_dir).cache_folder
    findings = []
    for finding in all_checks(arguments.host, arguments.port, folder):
        findings.append(finding)
        if not arguments.json:
            _show(finding)
    count = {status: sum(finding.status == status for finding in findings) for status in _MARKS}
    if arguments.json:
        print(json.dumps({"works": not count["problem"], "findings": [one.as_json() for one in findings]}, indent=1))
    else:
        print(f"\nproblems (!): {count['problem']}, hints (?): {count['hint']}")
    return DOES_NOT_WORK if count["problem"] else WORKS


def _show(finding: Finding) -> None:
    print(f"{_MARKS[finding.status]} {finding.name:{_WIDTH}}  {finding.value}", flush=True)
    if finding.advice:
        print(f"  {'':{_WIDTH}}  -> {finding.advice}")
