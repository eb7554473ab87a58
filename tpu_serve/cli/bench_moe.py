"""`tpu-serve bench moe`: which implementation of the experts is the fastest, measured on this CPU or compiled for TPUs that are not here."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

from tpu_serve.cli.bench_engine import write_json
from tpu_serve.cli.options import positive
from tpu_serve.config import ConfigError

DEFAULT_LAYERS = ("tiny-chat", "8-experts", "32-experts", "128-experts")
DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)


def add(kinds: Any) -> None:
    """Adds `moe` to the benchmarks."""
    moe = kinds.add_parser(
        "moe",
        help="the experts of one layer on this CPU: dense, ragged and gathered, by token count",
        description="Times the experts of one layer on this CPU, with random weights and random routing, by the three implementations in XLA's own "
        "operations, and says which one is fastest and which one the server takes. The kernels for TPUs are not timed: a CPU only simulates them.",
    )
    moe.add_argument(
        "--workload",
        metavar="SHAPE",
        nargs="+",
        help="layers: names, or sizes as in 8x2x512x1024: experts, experts of a token, hidden, intermediate "
        "(default: tiny-chat 8-experts 32-experts 128-experts); with --compiled models, as in bench kernels (default: Qwen3-30B-A3B)",
    )
    moe.add_argument(
        "--num-tokens",
        metavar="N",
        type=positive,
        nargs="+",
        help="rows of the layer's program (default: 1 2 4 8 16 32 64 256; with --compiled 16 64 256 1024 4096)",
    )
    moe.add_argument(
        "--dtype",
        metavar="TYPE",
        nargs="+",
        help="float32 or bfloat16, or both (default: bfloat16)",
    )
    moe.add_argument(
        "--padding",
        metavar="PERCENT",
        type=_percent,
        help="how many of the rows are padding, as in a step whose bucket is not full; one row stays a token (default: 0)",
    )
    moe.add_argument("--num-iters", metavar="N", type=positive, help="measured calls per case (default: 9)")
    moe.add_argument("--output-json", type=Path, metavar="FILE", help="write everything, raw samples included, to FILE")
    group = moe.add_argument_group("the fused kernel, without a TPU")
    group.add_argument(
        "--compiled",
        action="store_true",
        help="compile the fused kernel for the chips below, model its time, and print it beside the least that XLA's own operations can take; "
        "needs libtpu",
    )
    some = {"nargs": "+", "default": None}
    group.add_argument("--chip", metavar="CHIP", **some, help="v5e, v5p, v6e, tpu7x (default: v6e)")
    group.add_argument("--num-devices", metavar="N", type=positive, **some, help="of the slice (default: 8)")
    group.add_argument("--format", metavar="FORMAT", **some, help="of the weights (default: bfloat16)")
    group.add_argument("--timeout", metavar="S", type=positive, help="seconds for one program (default: 600)")
    moe.add_config_option()
    moe.set_defaults(run=run, parser=moe)


def run(arguments: argparse.Namespace) -> int:
    """Measures or compiles, prints a table and perhaps writes a file; 1 when the results of the backends differ or a program failed."""
    _check_options(arguments)
    return _run_compiled(arguments) if arguments.compiled else _run_here(arguments)


def _check_options(arguments: argparse.Namespace) -> None:
    others = (
        ("chip", "num_devices", "format", "timeout") if not arguments.compiled else ("dtype", "padding", "num_iters")
    )
    for name in others:
        if getattr(arguments, name) is not None:
            what = (
                "needs --compiled" if not arguments.compiled else "is about this CPU and has no meaning with --compiled"
            )
            raise ConfigError(f"--{name.replace('_', '-')} {what}.")
    file: Path | None = arguments.output_json
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--output-json {file} cannot be written: it is a folder, or its folder does not exist.")


def _run_compiled(arguments: argparse.Namespace) -> int:
    from tpu_serve.bench import kernels, moe_compiled
    from tpu_serve.bench.journal_file import versions
    from tpu_serve.bench.kernel_rows import run_cell
    from tpu_serve.cli.progress import Progress

    selection = kernels.Selection(
        chips=tuple(arguments.chip or ["v6e"]),
        workloads=tuple(arguments.workload or ["Qwen3-30B-A3B"]),
        formats=tuple(arguments.format or ["bfloat16"]),
        tokens=tuple(arguments.num_tokens or [16, 64, 256, 1024, 4096]),
        device_counts=tuple(arguments.num_devices or [8]),
    )
    cells = kernels.check(selection)
    timeout = arguments.timeout or 600
    with Progress(len(cells), "programs") as progress:
        rows = moe_compiled.compiled_rows(cells, lambda cell: run_cell(cell, None, timeout), progress.advance)
    print(moe_compiled.text(rows))
    _write(
        arguments.output_json,
        {
            "benchmark": "moe",
            "is_compiled": True,
            "versions": versions(),
            "warnings": [
                f"{row.workload}, {row.num_tokens} tokens: {row.reason}" for row in rows if row.outcome == "failed"
            ],
            "results": [row.as_json() for row in rows],
        },
    )
    return int(any(row.outcome == "failed" for row in rows))


def _run_here(arguments: argparse.Namespace) -> int:
    from tpu_serve.bench.moe_cases import make_cases, read_layer
    from tpu_serve.device.chip import cpu_chip

    layers = [read_layer(word) for word in arguments.workload or DEFAULT_LAYERS]
    padding, num_iters = arguments.padding or 0, arguments.num_iters or 9
    memory = cpu_chip().memory_bytes
    cases = make_cases(layers, arguments.dtype or ["bfloat16"], arguments.num_tokens or DEFAULT_TOKENS, padding, memory)

    from tpu_serve.bench import moe, moe_rows
    from tpu_serve.bench.report import Environment
    from tpu_serve.cli.progress import Progress
    from tpu_serve.moe_plan.portable import portable

    environment = Environment.of([moe.cpu()])
    with Progress(len(cases) * (num_iters + 1), "rounds") as progress:
        rows = moe.measure(cases, num_iters, lambda num_tokens, *_: portable(num_tokens), progress.advance)
    print(f"bench moe: on {environment}\n")
    print(moe_rows.text(rows))
    warnings = moe_rows.warnings(rows)
    _write(
        arguments.output_json,
        {
            "benchmark": "moe",
            "versions": dict(environment.versions),
            "device": dict(environment.device),
            "settings": {"num_iters": num_iters, "padding_percent": padding},
            "warnings": warnings,
            "verdict": moe_rows.verdict(rows),
            "results": moe.document(rows),
        },
    )
    return int(bool(warnings))


def _write(file: Path | None, document: dict[str, Any]) -> None:
    if file is not None:
        write_json(file, {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **document})


def _percent(text: str) -> int:
    return 0 if text == "0" else positive(text)
