"""`tpu-serve bench latency`, `throughput` and `startup`: the engine on this machine, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_serve.cli.bench_dataset import add_dataset_options, dataset_options
from tpu_serve.cli.foreign import Foreign, add_foreign_flags
from tpu_serve.cli.options import add_engine_options, add_others, engine_config, log_notes, positive
from tpu_serve.cli.parser import Parser
from tpu_serve.config import ConfigError

NO_CACHE = (
    Foreign(
        flags=("--enable-prefix-caching",),
        takes=0,
        note=True,
        says="is off here: prompts that are found in the cache are not computed",
    ),
    Foreign(flags=("--no-enable-prefix-caching",), takes=0, done=""),
)
"""The prefix cache's switch where it must be off."""


def add(kinds: Any) -> None:
    """Adds the three to the benchmarks."""
    latency = kinds.add_parser(
        "latency",
        help="how long one batch takes, prefill and decode steps told apart",
        description="Time of one batch of random prompts from its start to its last token, in seconds; the part up to the first tokens and each "
        "decode step in milliseconds. Greedy, to the full length, prefix caching off.",
    )
    flag = latency.add_argument
    flag("--input-len", metavar="N", type=positive, default=32, help="tokens of a prompt (default: %(default)s)")
    flag("--output-len", metavar="N", type=positive, default=128, help="tokens of an answer (default: %(default)s)")
    flag("--batch-size", metavar="N", type=positive, default=8, help="prompts at once (default: %(default)s)")
    flag("--n", metavar="N", type=positive, default=1, help="sequences per prompt (default: %(default)s)")
    flag("--num-iters-warmup", metavar="N", type=_count, default=10, help="batches not measured (default: %(default)s)")
    flag("--num-iters", metavar="N", type=positive, default=30, help="batches measured (default: %(default)s)")
    flag("--profile", action="store_true", help="take a trace of one batch instead of measuring")
    flag("--profile-result-dir", metavar="FOLDER", type=Path, help="where the trace of --profile goes")
    _finish(latency, run_latency, is_cached=False)

    throughput = kinds.add_parser(
        "throughput",
        help="requests and tokens per second when all requests are there from the start",
        description="Requests and tokens per second when all requests are there from the start; lengths are in tokens. Temperature 1, to the full length.",
    )
    add_dataset_options(throughput, count=1000, name="random", has_seed=False)
    flag = throughput.add_argument
    flag("--n", metavar="N", type=positive, default=1, help="answers per prompt (default: %(default)s)")
    flag("--async-engine", action="store_true", help="through the engine's thread and an event loop, as in a server")
    flag("--disable-detokenize", action="store_true", help="make no text of the answers")
    _finish(throughput, run_throughput)

    startup = kinds.add_parser(
        "startup",
        help="how long the engine takes to start, cold and warm",
        description="Seconds that an engine takes to start, by phase, each time in a process of its own. Cold: no program is compiled yet. Warm: all are "
        "in --compile-cache-dir. The files of the model may be in the system's memory in both.",
    )
    flag = startup.add_argument
    flag("--num-iters-cold", metavar="N", type=_count, default=3, help="cold starts (default: %(default)s)")
    flag("--num-iters-warmup", metavar="N", type=_count, default=1, help="starts before the warm ones (default: 1)")
    flag("--num-iters-warm", metavar="N", type=_count, default=3, help="warm starts (default: %(default)s)")
    _finish(startup, run_startup)


def run_latency(arguments: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes a file; returns the exit code."""
    if arguments.profile != (arguments.profile_result_dir is not None):
        raise ConfigError("--profile and --profile-result-dir FOLDER go together.")
    if arguments.profile and arguments.output_json is not None:
        raise ConfigError("--output-json has nothing to hold with --profile: a traced batch is not measured.")
    check_writable(arguments.output_json)
    config = engine_config(arguments, enable_prefix_caching=False)
    log_notes(arguments)

    from tpu_serve.bench.latency import LatencyPlan, bench_latency
    from tpu_serve.cli.progress import Progress

    plan = LatencyPlan(
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        batch_size=arguments.batch_size,
        num_choices=arguments.n,
        num_warmup=arguments.num_iters_warmup,
        num_iters=arguments.num_iters,
        trace_dir=arguments.profile_result_dir,
    )
    with Progress(plan.num_warmup + plan.num_iters, "batches") as progress:
        found = bench_latency(config, plan, progress.phase, progress.advance)
    print(found.text())
    if arguments.output_json is not None:
        write_json(arguments.output_json, found.document())
    return 0


def run_throughput(arguments: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes a file; returns the exit code."""
    if arguments.async_engine and arguments.disable_detokenize:
        raise ConfigError("--disable-detokenize has no meaning with --async-engine, which makes text as a server does.")
    check_writable(arguments.output_json)
    dataset = dataset_options(arguments)
    if dataset.is_self_timed:
        raise ConfigError("--self-timed has no meaning for bench throughput: all requests are there from the start.")
    num_sequences = arguments.num_prompts * arguments.n
    forced = {}
    if arguments.async_engine and getattr(arguments, "max_num_queued_reqs", 0) < num_sequences:
        forced["max_num_queued_reqs"] = num_sequences
    config = engine_config(arguments, **forced)
    log_notes(arguments)

    from tpu_serve.bench.throughput import bench_throughput
    from tpu_serve.cli.progress import Progress

    with Progress(num_sequences, "answers") as progress:
        found = bench_throughput(
            config,
            dataset,
            arguments.num_prompts,
            arguments.n,
            is_async=arguments.async_engine,
            detokenizes=not arguments.disable_detokenize,
            on_phase=progress.phase,
            on_done=progress.advance,
        )
    print(found.text())
    if arguments.output_json is not None:
        write_json(arguments.output_json, found.document())
    return 0


def run_startup(arguments: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes a file; returns the exit code."""
    counts = (arguments.num_iters_cold, arguments.num_iters_warmup, arguments.num_iters_warm)
    if not counts[0] + counts[2]:
        raise ConfigError("--num-iters-cold 0 and --num-iters-warm 0 leave nothing to measure.")
    if counts[1] and not counts[2] and arguments.num_iters_warmup != 1:
        raise ConfigError("--num-iters-warmup has no meaning with --num-iters-warm 0.")
    if not counts[2]:
        counts = (counts[0], 0, 0)
    check_writable(arguments.output_json)
    config = engine_config(arguments)
    log_notes(arguments)

    from tpu_serve.bench.startup import bench_startup
    from tpu_serve.cli.progress import Progress

    with Progress(sum(counts), "starts") as progress:
        found = bench_startup(config, *counts, progress.advance)
    print(found.text())
    if arguments.output_json is not None:
        write_json(arguments.output_json, found.document())
    return 0


def check_writable(file: Path | None) -> None:
    """Raises `ConfigError` when --output-json cannot be a file, before anything is measured for it."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--output-json {file} cannot be written: it is a folder, or its folder does not exist.")


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Writes a document and says so."""
    try:
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {file} cannot be written: {error.strerror}.") from None
    print(f"wrote {file}", file=sys.stderr)


def add_measured_engine_options(parser: Parser, *, is_cached: bool = True) -> None:
    """Adds MODEL, the engine's options and --config, so that a file for `serve` can be used as it is. Call it last.

    Args:
      is_cached: the prefix cache may be on.
    """
    add_engine_options(parser, without=() if is_cached else {"enable_prefix_caching"})
    if not is_cached:
        add_foreign_flags(parser, NO_CACHE)
    add_others(parser)


def _finish(parser: Parser, run: Any, *, is_cached: bool = True) -> None:
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures to FILE")
    add_measured_engine_options(parser, is_cached=is_cached)
    parser.set_defaults(run=run, parser=parser)


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
