"""`tpu-serve bench plain`: the engine against the same model in plain jitted JAX."""

from __future__ import annotations

import argparse

from tpu_serve.cli.bench_engine import check_writable, write_json
from tpu_serve.cli.options import engine_config


def run_plain(arguments: argparse.Namespace) -> int:
    """Measures, prints a table and perhaps writes a file; returns the exit code."""
    check_writable(arguments.output_json)
    config = engine_config(arguments, enable_prefix_caching=False)

    from tpu_serve.bench.plain import COLUMNS, bench_plain, cells
    from tpu_serve.bench.report import table
    from tpu_serve.bench.sweep import Sweep
    from tpu_serve.cli.progress import Progress

    sweep = Sweep(
        input_lens=tuple(arguments.input_len),
        batch_sizes=tuple(arguments.batch_size),
        num_iters=arguments.num_iters,
        num_warmup=arguments.num_iters_warmup,
    )
    with Progress(sweep.num_runs, "batches") as progress:
        results = bench_plain(config, sweep, arguments.output_len, progress.phase, progress.advance)
    print(table(COLUMNS, [cells(result) for result in results]))
    print("Least times of all batches; a ratio is that of the engine to the plain loop.")
    if arguments.output_json is not None:
        write_json(arguments.output_json, {"benchmark": "plain", "results": results})
    return 0
