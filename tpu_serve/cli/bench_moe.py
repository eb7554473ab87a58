"""`tpu-serve bench moe`: which implementation of the experts in XLA's own operations is the fastest on this CPU."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from tpu_serve.cli.options import positive
from tpu_serve.config import ConfigError


def add(kinds: Any) -> None:
    """Adds `moe` to the benchmarks."""
    moe = kinds.add_parser(
        "moe",
        help="the experts of one layer on this CPU: dense against ragged, by token count",
        description="Times the experts of one layer on this CPU, with random weights and random routing, by the two implementations in XLA's own "
        "operations, and says which one is faster and which one the server takes. The kernels for TPUs are not timed: a CPU only simulates them.",
    )
    moe.add_argument(
        "--workload",
        metavar="SHAPE",
        nargs="+",
        default=["tiny-chat", "8-experts", "32-experts", "128-experts"],
        help="layers: names, or sizes as in 8x2x512x1024: experts, experts of a token, hidden, intermediate "
        "(default: tiny-chat 8-experts 32-experts 128-experts)",
    )
    moe.add_argument(
        "--num-tokens",
        metavar="N",
        type=positive,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64, 256],
        help="rows of the layer's program (default: 1 2 4 8 16 32 64 256)",
    )
    moe.add_argument(
        "--dtype",
        metavar="TYPE",
        nargs="+",
        default=["bfloat16"],
        help="float32 or bfloat16, or both (default: bfloat16)",
    )
    moe.add_argument(
        "--padding",
        metavar="PERCENT",
        type=_percent,
        default=0,
        help="how many of the rows are padding, as in a step whose bucket is not full; one row stays a token (default: %(default)s)",
    )
    moe.add_argument(
        "--num-iters", metavar="N", type=positive, default=9, help="measured calls per case (default: %(default)s)"
    )
    moe.add_argument("--output-json", type=Path, metavar="FILE", help="write everything, raw samples included, to FILE")
    moe.set_defaults(run=run, parser=moe)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table and perhaps writes a file; 1 when the results of the backends differ."""
    from tpu_serve.bench.moe_cases import make_cases, read_layer
    from tpu_serve.device.chip import cpu_chip

    file: Path | None = arguments.output_json
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--output-json {file} cannot be written: it is a folder, or its folder does not exist.")
    layers = [read_layer(word) for word in arguments.workload]
    memory = cpu_chip().memory_bytes
    cases = make_cases(layers, arguments.dtype, arguments.num_tokens, arguments.padding, memory)

    from tpu_serve.bench import moe, moe_rows
    from tpu_serve.bench.report import Environment
    from tpu_serve.cli.progress import Progress
    from tpu_serve.moe_plan.path import portable

    environment = Environment.of([moe.cpu()])
    with Progress(len(cases) * (arguments.num_iters + 1), "rounds") as progress:
        rows = moe.measure(cases, arguments.num_iters, portable, progress.advance)
    print(f"bench moe: on {environment}\n")
    print(moe_rows.text(rows))
    warnings = moe_rows.warnings(rows)
    if file is not None:
        document = {
            "benchmark": "moe",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": dict(environment.versions),
            "device": dict(environment.device),
            "settings": {"num_iters": arguments.num_iters, "padding_percent": arguments.padding},
            "warnings": warnings,
            "verdict": moe_rows.verdict(rows),
            "results": moe.document(rows),
        }
        try:
            file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output-json {file} cannot be written: {error.strerror}.") from None
        print(f"wrote {file}", file=sys.stderr)
    return int(bool(warnings))


def _percent(text: str) -> int:
    return 0 if text == "0" else positive(text)
