"""`tpu-serve bench`: `prefill` and `decode` time the engine alone, without a server; `kernels` reads what the TPU compiler makes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli import (
    bench_compare,
    bench_engine,
    bench_host,
    bench_models,
    bench_moe,
    bench_report,
    bench_serve,
    bench_stream,
)
from tpu_serve.cli.bench_engine import add_measured_engine_options
from tpu_serve.cli.bench_plain import run_plain
from tpu_serve.cli.options import engine_config, log_notes, positive
from tpu_serve.cli.parser import Parser
from tpu_serve.config import ConfigError

if TYPE_CHECKING:
    from tpu_serve.bench.kernel_cells import Cell
    from tpu_serve.bench.kernel_journal import Journal
    from tpu_serve.bench.kernel_rows import Row
    from tpu_serve.bench.report import Report
    from tpu_serve.bench.sweep import Sweep


def register(subparsers: Any) -> None:
    bench = subparsers.add_parser(
        "bench",
        help="measure the engine on this machine",
        description="Measures the engine with random prompts and greedy decoding, prefix caching off, no server in between.",
    )
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    prefill = kinds.add_parser(
        "prefill",
        help="time to first token, by prompt length, batch size and tokens of a step",
        description="Time from a batch of random prompts to the first token of each.",
    )
    prefill.add_argument(
        "--chunk",
        type=positive,
        nargs="+",
        metavar="N",
        help="most tokens of a step, one after the other; each at most --max-num-batched-tokens (default: that)",
    )
    _add_options(prefill, run_prefill, input_lens=(16, 64, 256), batch_sizes=(1, 4), num_iters=10, num_warmup=2)
    decode = kinds.add_parser(
        "decode",
        help="time per decode step, by batch size",
        description="Time of a step in which every sequence of a batch gets one token, apart from the prefill before.",
    )
    decode.add_argument(
        "--output-len",
        type=positive,
        default=64,
        metavar="N",
        help="tokens generated per prompt (default: %(default)s)",
    )
    plain = kinds.add_parser(
        "plain",
        help="the engine against the same model in plain jitted JAX",
        description="Times the engine and, in turn with it, a greedy loop around the model's forward pass with a dense cache and no engine.",
    )
    plain.add_argument(
        "--output-len",
        type=positive,
        default=64,
        metavar="N",
        help="tokens generated per prompt (default: %(default)s)",
    )
    _add_options(plain, run_plain, input_lens=(128,), batch_sizes=(1, 16), num_iters=5, num_warmup=1)
    bench_serve.add(kinds)
    bench_engine.add(kinds)
    bench_compare.add(kinds)
    bench_report.add(kinds)
    _add_kernels(kinds)
    bench_host.add(kinds)
    bench_moe.add(kinds)
    bench_models.add(kinds)
    bench_stream.add(kinds)
    _add_options(decode, run_decode, input_lens=(32,), batch_sizes=(1, 4, 16), num_iters=3, num_warmup=1)


def _add_options(
    parser: Parser,
    run: Any,
    *,
    input_lens: Sequence[int],
    batch_sizes: Sequence[int],
    num_iters: int,
    num_warmup: int,
) -> None:
    def add(flag: str, default: Any, help: str, **settings: Any) -> None:
        shown = default if isinstance(default, int) else " ".join(map(str, default))
        parser.add_argument(flag, default=default, help=f"{help} (default: {shown})", metavar="N", **settings)

    add("--input-len", tuple(input_lens), "prompt lengths in tokens", type=positive, nargs="+")
    add("--batch-size", tuple(batch_sizes), "numbers of prompts at once", type=positive, nargs="+")
    add("--num-iters", num_iters, "measured batches per case", type=positive)
    add("--num-iters-warmup", num_warmup, "batches per case before those", type=_count)
    parser.add_argument(
        "--output-json", type=Path, metavar="FILE", help="write everything, raw samples included, to FILE"
    )
    add_measured_engine_options(parser, is_cached=False)
    parser.set_defaults(run=run, parser=parser)


def _add_kernels(kinds: Any) -> None:
    kernels = kinds.add_parser(
        "kernels",
        help="what the TPU compiler makes of the kernels, without a TPU",
        description="Compiles kernels ahead of time for named chips and workloads, executes the compiled schedules, and prints bytes, matrix "
        "unit use, spills and modelled time beside the calculated bound. Nothing is measured on a TPU.",
    )
    kernels.add_argument("--compiled", action="store_true", help="required: the only way there is so far")
    some = {"nargs": "+", "default": None}
    kernels.add_argument("--kernel", metavar="NAME", **some, help="which kernels (default: fused_moe_v2)")
    kernels.add_argument("--chip", metavar="CHIP", **some, help="v5e, v5p, v6e, tpu7x (default: v5e v6e tpu7x)")
    kernels.add_argument(
        "--workload", metavar="NAME", **some, help="models whose layer it is (default: all that are known)"
    )
    kernels.add_argument(
        "--format", metavar="FORMAT", **some, help="weight formats (default: those that the chip runs)"
    )
    kernels.add_argument(
        "--num-tokens",
        metavar="N",
        type=positive,
        **some,
        help="tokens of the group (default for fused_moe_v2: 16 64 256 1024 4096 16384)",
    )
    kernels.add_argument(
        "--num-devices",
        metavar="N",
        type=positive,
        **some,
        help="devices of the group (default for fused_moe_v2: 4 8 16)",
    )
    kernels.add_argument(
        "--mode",
        metavar="MODE",
        help="of fused_moe_v2: D or G, with the rule's tiles (default: what a server would run, from the tuning tables)",
    )
    kernels.add_argument(
        "--timeout", metavar="S", type=positive, default=600, help="seconds for one cell (default: %(default)s)"
    )
    kernels.add_argument(
        "--jobs", metavar="N", type=positive, default=1, help="compilers at a time (default: %(default)s)"
    )
    kernels.add_argument(
        "--output-json",
        type=Path,
        metavar="FILE",
        help="everything that was found as JSON Lines, a cell's as soon as it is done; FILE is replaced unless --resume",
    )
    kernels.add_argument(
        "--resume",
        action="store_true",
        help="continue the FILE of --output-json, if it is there: cells that it has from the same versions and --mode are not "
        "compiled again, unless they failed",
    )
    kernels.add_config_option()
    kernels.set_defaults(run=run_kernels, parser=kernels)


def run_kernels(arguments: argparse.Namespace) -> int:
    """Compiles the cells asked for and prints a table; 1 when the compiler refused one that should be legal."""
    if not arguments.compiled:
        raise ConfigError(
            "bench kernels needs --compiled: kernels cannot be timed without a TPU, only compiled for one and modelled."
        )
    file = _writable(arguments.output_json)
    if arguments.resume and file is None:
        raise ConfigError("--resume needs the --output-json FILE that is to be continued.")

    from tpu_serve.bench import kernels
    from tpu_serve.bench.kernel_journal import Journal
    from tpu_serve.bench.kernel_table import text

    selection = kernels.Selection(**{
        name: tuple(value)
        for name, value in {
            "kernels": arguments.kernel, "chips": arguments.chip, "workloads": arguments.workload, "formats": arguments.format,
            "tokens": arguments.num_tokens, "device_counts": arguments.num_devices,
        }.items()
        if value is not None
    }, mode=arguments.mode)  # fmt: skip
    cells = kernels.check(selection)
    journal = None if file is None else Journal(file, cells, selection.mode, resume=arguments.resume)
    found = _compile_cells(cells, journal, arguments)
    rows = [found[cell.key] for cell in cells]
    print(text(rows))
    if file is not None:
        print(f"wrote {file}", file=sys.stderr)
    return int(any(row.outcome == "failed" for row in rows))


def _compile_cells(
    cells: Sequence[Cell], journal: Journal | None, arguments: argparse.Namespace
) -> dict[tuple[str, str], Row]:
    """The row of every cell by its key. Each is told, and written to the journal, as it is ready; those that it has are not made again."""
    from tqdm import tqdm

    from tpu_serve.bench.kernel_rows import sweep
    from tpu_serve.bench.kernel_table import short

    rows = {} if journal is None else dict(journal.kept)
    missing = [cell for cell in cells if cell.key not in rows]
    with ExitStack() as stack:
        if journal is not None:
            stack.enter_context(journal)
        if rows:
            print(f"tpu-serve: {len(rows)} of {len(cells)} cells are in the file", file=sys.stderr)
        progress = stack.enter_context(tqdm(total=len(cells), initial=len(rows), unit="cell", disable=None))
        made = stack.enter_context(closing(sweep(missing, arguments.mode, arguments.timeout, arguments.jobs)))
        try:
            for row in made:
                if journal is not None:
                    journal.add(row)
                rows[row.cell.key] = row
                tqdm.write(short(row), file=sys.stderr)
                progress.update()
        except KeyboardInterrupt:
            if journal is not None:
                print(f"tpu-serve: {len(rows)} of {len(cells)} cells are written; --resume continues", file=sys.stderr)
            raise
    return rows


def run_prefill(arguments: argparse.Namespace) -> int:
    """Measures, prints a table and perhaps writes a file; returns the exit code."""
    config, sweep = engine_config(arguments, enable_prefix_caching=False), _sweep(arguments)

    from tpu_serve.bench.run import bench_prefill
    from tpu_serve.cli.progress import Progress

    with Progress(sweep.num_runs, "batches") as progress:
        report = bench_prefill(config, sweep, progress.phase, progress.advance)
    return _show(report, arguments)


def run_decode(arguments: argparse.Namespace) -> int:
    """Measures, prints a table and perhaps writes a file; returns the exit code."""
    config, sweep = engine_config(arguments, enable_prefix_caching=False), _sweep(arguments)

    from tpu_serve.bench.run import bench_decode
    from tpu_serve.cli.progress import Progress

    with Progress(sweep.num_runs, "batches") as progress:
        report = bench_decode(config, sweep, arguments.output_len, progress.phase, progress.advance)
    return _show(report, arguments)


def _sweep(arguments: argparse.Namespace) -> Sweep:
    from tpu_serve.bench.sweep import Sweep

    _writable(arguments.output_json)
    log_notes(arguments)
    return Sweep(
        input_lens=tuple(arguments.input_len),
        batch_sizes=tuple(arguments.batch_size),
        num_iters=arguments.num_iters,
        num_warmup=arguments.num_iters_warmup,
        chunks=tuple(getattr(arguments, "chunk", None) or (None,)),
    )


def _writable(file: Path | None) -> Path | None:
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise ConfigError(f"--output-json {file} cannot be written: it is a folder, or its folder does not exist.")
    return file


def _show(report: Report, arguments: argparse.Namespace) -> int:
    print(report.text())
    if arguments.output_json is not None:
        try:
            report.write(arguments.output_json)
        except OSError as error:
            raise ConfigError(f"--output-json {arguments.output_json} cannot be written: {error.strerror}.") from None
        print(f"wrote {arguments.output_json}", file=sys.stderr)
    return 0


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)
