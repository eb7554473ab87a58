"""`tpu-serve tune`: finds tiles for a kernel and writes them to a folder of tables."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.layers import layer_of_checkpoint
from tpu_serve.cli.options import positive
from tpu_serve.cli.tune_experts import run_experts
from tpu_serve.cli.tune_verify import run_verify
from tpu_serve.config import ConfigError

if TYPE_CHECKING:
    from tpu_serve.tuner.inputs import Routing
    from tpu_serve.tuner.jobs import Job, Selection
    from tpu_serve.tuner.run import Result, Settings
    from tpu_serve.tuner.trial import Executor

KERNELS = ("fused_moe_v2", "experts")
SCORES = ("bytes", "schedule")
WITHOUT_TPU = "--compile-only, which compiles for a TPU on any machine and measures nothing"


def register(subparsers: Any) -> None:
    tune = subparsers.add_parser(
        "tune",
        help="find tiles for a kernel, by measuring on a TPU or by compiling for one",
        description="Tries configs of a kernel for layers of known models and writes the best of each into tables for --moe-tuning-dir. "
        f"On a TPU configs are checked and measured; elsewhere it takes {WITHOUT_TPU}. "
        "`tune experts` times XLA's own ways of running experts on this CPU, by --model and --num-tokens.",
    )
    tune.add_argument(
        "kernel",
        metavar="KERNEL",
        help=f"one of: {', '.join(KERNELS)}; experts is no kernel but what a CPU takes instead",
    )
    some = {"nargs": "+", "default": None}
    tune.add_argument(
        "--workload",
        metavar="NAME",
        **some,
        help="models whose layer it is (default: all that are known, or none with --model)",
    )
    tune.add_argument(
        "--model",
        metavar="MODEL",
        **some,
        help="Hugging Face folders or hub ids of other models; only their config.json is read",
    )
    tune.add_argument(
        "--chip",
        metavar="CHIP",
        **some,
        help="v5e, v5p, v6e, tpu7x (default: all; on a TPU the one that it is)",
    )
    tune.add_argument("--format", metavar="FORMAT", **some, help="weight formats (default: those that the chip runs)")
    tune.add_argument(
        "--num-devices",
        metavar="N",
        type=positive,
        **some,
        help="devices of the group (default: 4 8 16, or all of a TPU host)",
    )
    tune.add_argument(
        "--num-tokens",
        metavar="N",
        type=positive,
        **some,
        help="tokens of the group, a table's buckets (default: all, 8 to 32768)",
    )
    tune.add_argument("--compile-only", action="store_true", help="do not measure: only compile, on any machine")
    tune.add_argument(
        "--candidates", metavar="N", type=positive, default=8,
        help="configs tried for each key; 1 tries the rule's alone (default: %(default)s)",
    )  # fmt: skip
    tune.add_argument(
        "--score", metavar="KIND",
        help="with --compile-only, what ranks configs: bytes (calculated, and the config must compile) or schedule (modelled from the "
        "compiled schedule, slower) (default: schedule, or bytes with --candidates 1)",
    )  # fmt: skip
    tune.add_argument("--routing-counts", type=Path, metavar="FILE", help="on a TPU: measure also with experts as popular as in FILE, a JSON list of counts")  # fmt: skip
    tune.add_argument(
        "--jobs", metavar="N", type=positive, default=1, help="compilers at a time (default: %(default)s)"
    )
    tune.add_argument("--timeout", metavar="S", type=positive, default=600, help="seconds for one config (default: %(default)s)")  # fmt: skip
    tune.add_argument("--output-dir", type=Path, metavar="DIR", required=True, help="folder of tables that rows are merged into; made if it is not there")  # fmt: skip
    tune.add_argument("--journal", type=Path, metavar="FILE", help="every try as JSON Lines, replaced unless --resume (default: DIR/tune.jsonl)")  # fmt: skip
    tune.add_argument("--resume", action="store_true", help="continue the journal, if it is there: what is in it is not tried again, unless it took too long or died")  # fmt: skip
    tune.add_argument(
        "--verify",
        action="store_true",
        help="with --compile-only: compile the rows that DIR holds instead of looking for others, and change nothing",
    )
    tune.add_argument(
        "--sample", metavar="N", type=positive, help="with --verify: so many of the rows, evenly spaced (default: all)"
    )
    tune.add_argument("--missing", action="store_true", help="only what has no row in DIR yet")
    tune.add_argument(
        "--report", type=Path, metavar="FILE", help="write all candidates with their scores as one HTML file"
    )
    tune.set_defaults(run=run, parser=tune)


def run(arguments: argparse.Namespace) -> int:
    """Tunes and writes; 1 when a key has no config that works."""
    if arguments.kernel not in KERNELS:
        raise ConfigError(f"KERNEL {arguments.kernel} is unknown; known are {', '.join(KERNELS)}.")
    if arguments.kernel == "experts":
        return run_experts(arguments)
    if arguments.score not in (None, *SCORES):
        raise ConfigError(f"--score {arguments.score} is unknown; known are {', '.join(SCORES)}.")
    if arguments.score is not None and not arguments.compile_only:
        raise ConfigError("--score is for --compile-only: on a TPU time is the score.")
    if arguments.compile_only and arguments.routing_counts is not None:
        raise ConfigError("--routing-counts is for measuring, --compile-only knows uniform routing only.")
    if not arguments.compile_only and arguments.jobs != 1:
        raise ConfigError("--jobs is for --compile-only: a TPU measures one thing at a time.")
    if arguments.sample is not None and not arguments.verify:
        raise ConfigError("--sample is for --verify.")
    if arguments.verify:
        return run_verify(arguments, lambda stop: _compilers(arguments, stop, "bytes"))
    _writable("--report", arguments.report, arguments.output_dir)
    _writable("--journal", arguments.journal, arguments.output_dir)

    from tpu_serve.tuner import rows
    from tpu_serve.tuner.jobs import Selection, jobs_of
    from tpu_serve.tuner.journal import Journal

    asked = {
        "chips": arguments.chip, "workloads": arguments.workload, "formats": arguments.format,
        "device_counts": arguments.num_devices, "tokens": arguments.num_tokens,
    }  # fmt: skip
    selection = Selection(**{name: tuple(value) for name, value in asked.items() if value is not None})
    if arguments.model is not None:
        format = arguments.format[0] if arguments.format else None
        layers = tuple(layer_of_checkpoint(model, format) for model in arguments.model)
        selection = dataclasses.replace(selection, layers=layers, workloads=tuple(arguments.workload or ()))
    jobs_of(selection)  # whatever the machine is, the names are known
    stop = threading.Event()
    with ExitStack() as stack:
        if arguments.compile_only:
            executor = _compilers(arguments, stop)
        else:
            selection, executor = _measurers(arguments, selection, stop, stack)
        jobs = jobs_of(selection)
        _prepare(arguments.output_dir)
        chips = {job.chip.name: job.chip for job in jobs}
        held = {
            name: {row.key for row in rows.read(arguments.output_dir, chip).entries} for name, chip in chips.items()
        }
        if arguments.missing:
            jobs = [job for job in jobs if job.key not in held[job.chip.name]]
        journal = stack.enter_context(
            Journal(arguments.journal or arguments.output_dir / "tune.jsonl", resume=arguments.resume)
        )
        if journal.num_kept:
            print(f"tpu-serve: {journal.num_kept} tries are in the journal", file=sys.stderr)
        return _tune(jobs, executor, _settings(arguments), journal, arguments, stop)


def _tune(
    jobs: Sequence[Job], executor: Callable[[], Executor], settings: Settings, journal: Any,
    arguments: argparse.Namespace, stop: threading.Event,
) -> int:  # fmt: skip
    from tqdm import tqdm

    from tpu_serve.tuner import rows
    from tpu_serve.tuner.page import page
    from tpu_serve.tuner.run import FAILED_JOB, REFUSED_JOB, TUNED, tune_all

    results: list[Result] = []
    written: set[Path] = set()

    def report() -> None:
        if arguments.report is not None:
            order = {job: place for place, job in enumerate(jobs)}
            text = page(sorted(results, key=lambda one: order[one.job]))
            try:
                arguments.report.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--report {arguments.report} cannot be written: {error.strerror}.") from None
            print(f"wrote {arguments.report}", file=sys.stderr)

    made = tune_all(jobs, executor, settings, journal, arguments.jobs, stop)
    with tqdm(total=len(jobs), unit="key", disable=None) as progress, closing(made):
        try:
            for result in made:
                results.append(result)
                if result.row is not None:
                    path = rows.merge_into(arguments.output_dir, result.job.chip, [result.row], settings.jax)
                    if result.row in rows.read(arguments.output_dir, result.job.chip).entries:
                        written.add(path)
                    else:
                        said = f"{result.job.label}  not written: {path} has a row that is more trusted"
                        tqdm.write(said, file=sys.stderr)
                tqdm.write(_line(result), file=sys.stderr)
                progress.update()
        except KeyboardInterrupt:
            report()
            print(
                f"tpu-serve: {len(results)} of {len(jobs)} keys are done, what was found is written; --resume continues",
                file=sys.stderr,
            )
            raise
    report()
    count = {outcome: sum(one.outcome == outcome for one in results) for outcome in (TUNED, REFUSED_JOB, FAILED_JOB)}
    print(f"{len(results)} keys: {', '.join(f'{number} {outcome}' for outcome, number in count.items())}")
    for path in sorted(written):
        print(f"wrote {path}", file=sys.stderr)
    return int(count[FAILED_JOB] > 0)


def _line(result: Result) -> str:
    from tpu_serve.tuner.page import tiles

    if result.chosen is None:
        return f"{result.job.label}  {result.outcome}: {result.reason}"
    trial = dict(result.trials)[result.chosen]
    stays = " (the rule's)" if result.chosen == result.trials[0][0] else ""
    drift = f", control moved by {100 * result.drift:.1f} %" if result.drift else ""
    return f"{result.job.label}  {tiles(result.chosen)}{stays}; {trial.score_kind} {trial.score:.1f} of {len(result.trials)} tried{drift}"


def _compilers(arguments: argparse.Namespace, stop: threading.Event, kind: str = "") -> Callable[[], Executor]:
    import importlib.util

    from tpu_serve.tuner.compiling import Compile, Schedule

    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("compiling for a TPU needs the package libtpu: pip install 'tpu-serve[tpu]'.")
    kind = kind or arguments.score or ("bytes" if arguments.candidates == 1 else "schedule")
    make = Compile if kind == "bytes" else Schedule
    return lambda: make(arguments.timeout, stop)


def _measurers(
    arguments: argparse.Namespace, selection: Selection, stop: threading.Event, stack: ExitStack
) -> tuple[Selection, Callable[[], Executor]]:
    """The selection for the devices that are here, and what measures on them.

    Raises:
      ConfigError: there is no TPU, or not what is asked for.
    """
    from tpu_serve.tuner.inputs import ROUTINGS, captured
    from tpu_serve.tuner.jobs import jobs_of
    from tpu_serve.tuner.measuring import Measure

    routings: tuple[Routing, ...] = ROUTINGS
    if arguments.routing_counts is not None:
        routings = (*ROUTINGS, captured(arguments.routing_counts))
    measure = Measure(arguments.timeout, routings, stop=stop)
    stack.callback(measure.close)
    platform, chip, count = measure.devices()
    if platform != "tpu":
        raise ConfigError(f"tune measures on a TPU, and here is none ({platform}). There is {WITHOUT_TPU}.")
    if arguments.chip is not None and set(arguments.chip) != {chip}:
        raise ConfigError(f"--chip {' '.join(arguments.chip)} cannot be measured on {chip}. There is {WITHOUT_TPU}.")
    counts = selection.device_counts or (count,)
    if max(counts) > count:
        raise ConfigError(f"--num-devices {max(counts)} is more than the {count} {chip} devices that are here.")
    selection = dataclasses.replace(selection, chips=(chip,), device_counts=counts)
    for routing in routings:
        for job in jobs_of(selection):
            routing.likely(job.problem.num_experts)
    return selection, lambda: measure


def _settings(arguments: argparse.Namespace) -> Settings:
    from tpu_serve.bench.journal_file import versions
    from tpu_serve.tuner.run import Settings

    now = versions()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Settings(arguments.candidates, date, now["jax"] or "", now["libtpu"] or "")


def _writable(flag: str, file: Path | None, made: Path) -> None:
    """`made` is a folder that will be there."""
    if file is not None and (file.is_dir() or not (file.parent.is_dir() or file.parent.resolve() == made.resolve())):
        raise ConfigError(f"{flag} {file} cannot be written: it is a folder, or its folder does not exist.")


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir {folder} cannot be made: {error.strerror}.") from None
