"""`tpu-serve plan`: how a model's experts would run on a chip, token count by token count, and why. Needs no TPU and no weights."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_serve.cli.layers import layer_of_checkpoint
from tpu_serve.cli.options import json_object, positive
from tpu_serve.config import ConfigError, MoEOptions

if TYPE_CHECKING:
    from tpu_serve.device.chip import Chip
    from tpu_serve.moe_plan.layer import MoELayer, Policy
    from tpu_serve.moe_plan.plan import MoEPlan
    from tpu_serve.moe_plan.planner import Planner

BACKENDS = ("auto", "dense", "ragged", "grouped", "fused")
WIRES = ("bfloat16", "float32", "float8_e4m3fn", "int8")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="how a model's experts would run on a chip, and why",
        description="Prints, for every token count, which implementation of the mixture of experts runs, with which tiles and where these come from, the "
        "memory it takes, the bytes it moves and the least time it can take. All of it is calculated or read from tables: no TPU and no weights are needed.",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a Hugging Face folder or hub id, or one of the layers that tables are made for, as in Qwen3-30B-A3B; the embedded model when left out; "
        "with --coverage, all those layers",
    )
    add(
        "--chip",
        metavar="CHIP",
        help="v5e, v5p, v6e, tpu7x or cpu (default: v6e; with --coverage, all that have tables)",
    )
    add(
        "--num-devices", "--ep", "--tensor-parallel-size", "-tp", metavar="N", type=positive,
        help="devices that the experts are split over (default: 8, or 1 on a CPU; with --coverage, 4 8 16)",
    )  # fmt: skip
    add("--format", metavar="FORMAT", help="of the weights, as in fp8_channel (default: the type of the checkpoint)")
    add(
        "--num-tokens",
        metavar="N",
        type=positive,
        nargs="+",
        help="tokens of a step (default: those that tables have rows for)",
    )
    add("--moe-backend", choices=BACKENDS, default="auto", help="(default: %(default)s)")
    add(
        "--sequence-parallel",
        action="store_true",
        help="each device has its own tokens before and after; the server does not do this yet",
    )
    add("--dispatch-dtype", choices=WIRES, help="type in which tokens travel to the experts, with --sequence-parallel")
    add("--combine-dtype", choices=WIRES, help="type in which results travel back")
    add(
        "--moe-tuning-dir",
        metavar="DIR",
        nargs="+",
        default=(),
        help="folders of tuning tables that go before those of the package",
    )
    add(
        "--moe-tiles",
        metavar="JSON",
        type=json_object,
        default={},
        help="run the kernel with this config wherever it is legal",
    )
    add(
        "--coverage",
        action="store_true",
        help="list instead the token counts that have no row of their own in the tables",
    )
    add("--moe-strict-tables", action="store_true", help="exit with 1 where one has none")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints plans; 1 when tables are strict and incomplete."""
    questions = list(_questions(arguments))
    if arguments.coverage:
        return _show_coverage(questions, arguments)
    (question,) = questions
    question.planner.prepare(_tokens(arguments))
    plans = question.planner.plans
    if arguments.json:
        print(json.dumps(question.as_json(plans), indent=1))
    else:
        from tpu_serve.moe_plan.text import table

        print(f"{question.title}\n{table(plans)}")
    missing = _missing(question.planner, plans)
    if arguments.moe_strict_tables and missing:
        print(f"tpu-serve: no row of its own for {', '.join(map(str, missing))} tokens", file=sys.stderr)
    return int(arguments.moe_strict_tables and bool(missing))


@dataclass(frozen=True, slots=True)
class _Question:
    """One layer on one group of devices."""

    name: str
    planner: Planner

    @property
    def title(self) -> str:
        layer, planner = self.planner.layer, self.planner
        return (
            f"{self.name}: {layer.top_k} of {layer.num_experts} experts, hidden {layer.hidden}, intermediate {layer.intermediate}, {layer.format}, "
            f"on {planner.num_devices} x {planner.chip.name}"
        )

    def as_json(self, plans: tuple[MoEPlan, ...]) -> dict[str, Any]:
        import dataclasses

        return {
            "model": self.name, "chip": self.planner.chip.name, "num_devices": self.planner.num_devices,
            "layer": dataclasses.asdict(self.planner.layer), "plans": [plan.as_json() for plan in plans],
        }  # fmt: skip


def _tokens(arguments: argparse.Namespace) -> tuple[int, ...]:
    from tpu_serve.moe_plan.key import BUCKETS

    if max(arguments.num_tokens or [0]) >= 2**31:
        raise ConfigError(f"--num-tokens must be less than {2**31}.")
    return tuple(sorted(set(arguments.num_tokens))) if arguments.num_tokens else BUCKETS


def _questions(arguments: argparse.Namespace) -> Iterator[_Question]:
    from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
    from tpu_serve.kernels.fused_moe_v2.cases import DEVICE_COUNTS, WORKLOADS
    from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
    from tpu_serve.moe_plan.planner import Planner
    from tpu_serve.moe_plan.rows import rows_of

    chips: dict[str, Chip] = {**TPU_CHIPS, "cpu": cpu_chip()}
    for flag, value, known in (("--chip", arguments.chip, chips), ("--format", arguments.format, FORMATS)):
        if value is not None and value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{flag} {value} is unknown; known are {', '.join(known)}.{hint}")
    everything = arguments.coverage
    names = [arguments.chip] if arguments.chip else list(TPU_CHIPS) if everything else ["v6e"]
    usual = list(DEVICE_COUNTS) if everything else [1 if arguments.chip == "cpu" else 8]
    counts = [arguments.num_devices] if arguments.num_devices else usual
    models = list(WORKLOADS) if everything and arguments.model is None else [arguments.model]
    policy = _policy(arguments)
    for chip in names:
        rows = rows_of(chip, MoEOptions(moe_tuning_dir=tuple(arguments.moe_tuning_dir)).tuning_folders)
        for model in models:
            for name, layer in _layers(model, arguments, chips[chip], everything):
                for count in counts:
                    yield _Question(name, Planner(layer, count, chips[chip], policy, rows))


def _policy(arguments: argparse.Namespace) -> Policy:
    from tpu_serve.moe_plan.key import read_tiles
    from tpu_serve.moe_plan.layer import Policy

    if arguments.dispatch_dtype and not arguments.sequence_parallel:
        raise ConfigError(
            "--dispatch-dtype needs --sequence-parallel: otherwise every device has all tokens, and none are dispatched."
        )
    return Policy(
        backend=arguments.moe_backend,
        sequence_parallel=arguments.sequence_parallel,
        dispatch_dtype=arguments.dispatch_dtype,
        combine_dtype=arguments.combine_dtype,
        tiles=read_tiles(MoEOptions(moe_tiles=arguments.moe_tiles).tiles),
    )


def _layers(
    model: str | None, arguments: argparse.Namespace, chip: Chip, every_format: bool
) -> Iterator[tuple[str, MoELayer]]:
    """(name, layer) of a model: one, or for a known workload all formats that the chip runs."""
    from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
    from tpu_serve.moe_plan.layer import MoELayer

    if model in WORKLOADS and not Path(model).exists():
        workload = WORKLOADS[model]
        formats = workload.formats(chip.name) if chip.is_tpu else ("bfloat16",)
        chosen = (arguments.format,) if arguments.format else formats if every_format else formats[:1]
        for format in chosen:
            yield model, MoELayer.of_workload(workload, format)
        return
    yield layer_of_checkpoint(model, arguments.format)


def _missing(planner: Planner, plans: tuple[MoEPlan, ...]) -> list[int]:
    return [plan.num_tokens for plan in plans if planner.is_applicable(plan) and not plan.has_exact_row]


def _show_coverage(questions: list[_Question], arguments: argparse.Namespace) -> int:
    """A line for every layer that lacks rows, and how many there are in all."""
    tokens = _tokens(arguments)
    found: list[dict[str, Any]] = []
    for question in questions:
        planner = question.planner
        planner.prepare(tokens, is_quiet=True)
        applicable = [plan for plan in planner.plans if planner.is_applicable(plan)]
        found.append({
            "model": question.name, "chip": planner.chip.name, "num_devices": planner.num_devices, "format": planner.layer.format,
            "num_wanted": len(applicable), "missing": _missing(planner, planner.plans),
        })  # fmt: skip
    wanted, lacking = sum(one["num_wanted"] for one in found), sum(len(one["missing"]) for one in found)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for one in found:
            if one["missing"]:
                listed = "all" if len(one["missing"]) == one["num_wanted"] else ", ".join(map(str, one["missing"]))
                print(f"{one['model']} {one['format']} on {one['num_devices']} x {one['chip']}: no row for {listed}")
        print(f"{wanted - lacking} of {wanted} token counts have a row of their own.")
    return int(arguments.moe_strict_tables and lacking > 0)
