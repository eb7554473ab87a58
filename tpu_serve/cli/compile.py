"""`tpu-serve compile`: the programs of an engine, compiled on a machine that may lack its devices and kept for its start."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.options import add_engine_options, add_others, engine_config, log_notes
from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.config.compile import LAUNCH_BARRIER

if TYPE_CHECKING:
    from tpu_serve.engine.precompile import Kept

CHIPS_PER_HOST = {"v5e": 8, "v6e": 8, "v5p": 4, "tpu7x": 4}
"""Most chips of one machine: https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm."""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compile",
        help="compile a model's programs for TPUs that need not be here",
        usage="%(prog)s [MODEL] --topology NAME --out DIR [OPTIONS]",
        description="Compiles every program that `tpu-serve serve` runs with these options, and keeps them in DIR: a server with --compile-cache-dir DIR and "
        "the same options finds them there. Weights are not read. Each program is looked up by what it is made of: its code, the versions of jax, jaxlib and "
        "libtpu, the compiler's flags in the environment, and the devices and how they lie beside each other. Where any of that differs, or a program "
        "cannot be loaded, the server says so in its log and compiles. Nobody but a TPU can load a TPU's programs: that they load was checked on CPUs "
        "only; that equal options give equal names was checked for TPUs too. Exit code: 0 all programs are there, 2 they are not; standard error says why.",
    )
    add_engine_options(parser, without={"compile_cache_dir"})
    group = parser.add_argument_group("compile")
    group.add_argument(
        "--topology",
        metavar="NAME",
        required=True,
        help="the slice of TPUs, as in v6e:2x4 or tpu7x:2x2x1, of which the server takes as many devices as its options say; or cpu for this machine's processor",
    )
    group.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder that the programs are put in")
    group.add_argument("--json", action="store_true", help="print JSON")
    add_others(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Compiles and prints a table."""
    from tpu_serve.cli.progress import Progress

    config = engine_config(arguments, compile_cache_dir=str(arguments.out))
    log_notes(arguments)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {arguments.out} cannot be used: {error.strerror}.") from None
    devices = _devices(config, arguments.topology)

    from tpu_serve.engine.precompile import precompile

    with Progress(None, "programs") as progress:
        plan, kept = precompile(config, devices, progress.phase)
    if arguments.json:
        print(json.dumps(_document(arguments, len(devices), plan.num_pages, kept), indent=1))
    else:
        print(_text(arguments, len(devices), plan.num_pages, kept))
    return 0


def _devices(config: EngineConfig, name: str) -> list[Any]:
    """What the server would take of the topology.

    Raises:
      ConfigError: there is no such topology, or it has fewer devices than the options ask for.
    """
    import jax

    from tpu_serve.bench.compiled.topology import target_devices, topology_named
    from tpu_serve.device.devices import first_devices, take_devices

    jax.config.update("jax_platforms", "cpu")  # TPUs that are here are somebody else's
    if name == "cpu":
        return take_devices(config.parallel)
    try:
        wanted = topology_named(name)
    except ConfigError as error:
        raise ConfigError(f"--topology: {str(error).rstrip('.')}; and cpu.") from None
    on_one_host = math.prod(wanted.grid) <= CHIPS_PER_HOST[wanted.chip]
    if not on_one_host:
        print(
            f"tpu-serve: warning: {name} is more than one machine, and a server runs on one only for now",
            file=sys.stderr,
        )
    try:
        return first_devices(target_devices(wanted, on_one_host=on_one_host, flags=LAUNCH_BARRIER), config.parallel)
    except ConfigError as error:
        raise ConfigError(f"--topology {name}: {error}") from None


def _document(arguments: argparse.Namespace, num_devices: int, pages: tuple[int, ...], kept: list[Kept]) -> Any:
    return {
        "topology": arguments.topology,
        "num_devices": num_devices,
        "folder": str(arguments.out),
        "num_pages": list(pages),
        "programs": [
            {
                "name": one.name,
                "seconds": round(one.seconds, 3),
                "was_there": one.was_there,
                "temporary_bytes": one.temporary_bytes,
            }
            for one in kept
        ],
    }


def _text(arguments: argparse.Namespace, num_devices: int, pages: tuple[int, ...], kept: list[Kept]) -> str:
    lines = [f"{'program':<28}{'seconds':>10}{'temporary bytes':>18}"]
    for one in kept:
        size = "" if one.temporary_bytes is None else f"{one.temporary_bytes:,}"
        note = "  was there" if one.was_there else ""
        lines.append(f"{one.name:<28}{one.seconds:>10.1f}{size:>18}{note}")
    num_new = sum(not one.was_there for one in kept)
    lines.append(
        f"{len(kept)} programs for {num_devices} devices of {arguments.topology} with {'+'.join(map(str, pages))} pages are in {arguments.out}; "
        f"{num_new} of them are new. Serve with --compile-cache-dir {arguments.out} and the same options."
    )
    return "\n".join(lines)
