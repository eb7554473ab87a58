"""`tpu-serve check`: whether a model fits devices that need not be here, what lies where, and what to change where it does not fit."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.options import add_engine_options, add_others, engine_config, log_notes
from tpu_serve.config import ConfigError, EngineConfig, ParallelOptions

if TYPE_CHECKING:
    from tpu_serve.device.chip import Chip
    from tpu_serve.engine.design import Design
    from tpu_serve.engine.plan import EnginePlan
    from tpu_serve.hf_config import HFConfig

FITS, DOES_NOT_FIT = 0, 2


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "check",
        help="whether a model fits some devices, and what lies where",
        usage="%(prog)s [MODEL] [OPTIONS]",
        description="Makes every decision that `tpu-serve serve` makes before it reads weights, for devices that need not be here, and prints it: bytes by kind of "
        "weight, what is split and what is copied, the caches, how many sequences fit, how experts run. All of it is calculated, or what a step takes compiled with --compile. Exit code: 0 it fits, "
        "2 it does not or could not be checked; standard error has the reason, standard output the options that would make it fit, each tried.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("check")
    group.add_argument(
        "--chip", metavar="CHIP", help="v5e, v5p, v6e, tpu7x or cpu; what this machine has when left out"
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile the largest step for the chips, which takes minutes and no TPU: its figures take the place of those that are calculated",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    add_others(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints what a server would decide; 2 when it would not start."""
    from tpu_serve.checkpoint.folder import resolve
    from tpu_serve.cli.check_text import as_json, text
    from tpu_serve.device.mesh import make_abstract_mesh
    from tpu_serve.engine.design import design_engine
    from tpu_serve.engine.remedies import find_remedies
    from tpu_serve.engine.report import Report
    from tpu_serve.hf_config import read_config

    config = engine_config(arguments)
    log_notes(arguments)
    chip = _chip(arguments.chip)
    folder = resolve(config.model.source, config.model.revision, weights=False)
    hf_config = read_config(folder, config.model.hf_overrides)

    def make_design(options: EngineConfig) -> Design:
        parallel = options.parallel
        mesh = make_abstract_mesh(parallel.num_devices, parallel.data_parallel_size)
        return design_engine(options, hf_config, chip, mesh)

    largest = _compiler(config, hf_config, chip) if arguments.compile else None
    with _warnings() as notes:
        design = make_design(config)
        report = Report.of(config, design, largest)
        checkpoint = _checkpoint(config, design)
    notes += _remarks(chip, config.parallel.num_devices)
    with _warnings():
        remedies = [] if report.fits else find_remedies(config, design, make_design)
    if arguments.json:
        print(json.dumps(as_json(report, config, checkpoint, notes, remedies), indent=1))
    else:
        print(text(report, config, checkpoint, notes, remedies))
    if report.fits:
        return FITS
    sys.stdout.flush()
    print(f"tpu-serve: error: {report.problem}", file=sys.stderr)
    return DOES_NOT_FIT


def _chip(name: str | None) -> Chip:
    from tpu_serve.device.chip import TPU_CHIPS, chip_of, cpu_chip
    from tpu_serve.device.devices import take_devices
    from tpu_serve.tuner.jobs import known

    if name is None:
        return chip_of(take_devices(ParallelOptions())[0])
    chips = {**TPU_CHIPS, "cpu": cpu_chip()}
    known("--chip", [name], tuple(chips))
    return chips[name]


def _compiler(config: EngineConfig, hf_config: HFConfig, chip: Chip) -> Callable[[EnginePlan], Any]:
    """Compiles the largest step of a plan for chips that are not here.

    Raises:
      ConfigError: there is no compiler for them.
    """
    from tpu_serve.bench.compiled.topology import target_devices, topology
    from tpu_serve.device.mesh import make_mesh
    from tpu_serve.engine.design import design_engine
    from tpu_serve.engine.programs import make_programs
    from tpu_serve.runner.compilation import Compilation
    from tpu_serve.runner.programs import Allowed

    if not chip.is_tpu:
        raise ConfigError("--compile is for TPUs: name one with --chip, of v5e, v5p, v6e and tpu7x.")
    parallel = config.parallel
    mesh = make_mesh(target_devices(topology(chip.name, parallel.num_devices)), parallel.data_parallel_size)

    def largest(plan: EnginePlan) -> Any:
        design = design_engine(config, hf_config, chip, mesh)
        programs = make_programs(config, design, plan, Allowed(design.model.vocab_size))
        program = programs.steps[-1]
        return Compilation([program])[program.name]  # in a thread, so that it can be interrupted

    return largest


def _checkpoint(config: EngineConfig, design: Design) -> str:
    """What is known of the weights' files, whose headers are compared with the model.

    Raises:
      ConfigError: they are not those of the model.
    """
    from tpu_serve.checkpoint.accounting import check_header, choose_sources
    from tpu_serve.checkpoint.quantised.folder import open_checkpoint
    from tpu_serve.device.params import iterate

    folder = design.hf_config.folder
    if config.model.load_format == "dummy":
        return "random weights (--load-format dummy)"
    if not any(folder.glob("*.safetensors")):
        return "weights are not here; config.json says what they are"
    files = open_checkpoint(folder, design.hf_config)
    sources = choose_sources(files, design.placement.specs, design.ignored_weights)
    for path, spec in iterate(design.placement.specs):
        check_header(files, path, spec, sources[path])
    keys = [key for source in sources.values() for key in source.keys]
    num_bytes = sum(map(files.num_bytes, keys))
    return f"{len(keys)} tensors of {num_bytes:,} bytes, whose headers agree with config.json; no values were read"


def _remarks(chip: Chip, num_devices: int) -> list[str]:
    from tpu_serve.device.chip import slice_sizes

    sizes = slice_sizes(chip)
    if not chip.is_tpu or num_devices in sizes:
        return []
    return [f"There is no {chip.name} slice of {num_devices} devices; there are {', '.join(map(str, sizes))}."]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that this package logs meanwhile, which go nowhere else."""
    notes: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() not in notes:
                notes.append(record.getMessage())

    package, handler = logging.getLogger("tpu_serve"), Collect(logging.WARNING)
    package.addHandler(handler)
    propagated, package.propagate = package.propagate, False
    try:
        yield notes
    finally:
        package.removeHandler(handler)
        package.propagate = propagated
