"""The tables of `bench models`, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.models.cells import all_layers
from tpu_serve.bench.models.parts import ATTENTION, MOE, PARTS, RECURRENT
from tpu_serve.bench.models.rows import COMPILED, Program, Row
from tpu_serve.bench.models.step import DECODE_CONTEXT
from tpu_serve.device.chip import GIB, MIB

NOTE = (
    "Nothing here was measured on a TPU. Compiled: temporaries, code, collectives, seconds to compile (of the machine that compiled, the "
    "compiler's dump included). Simulated: the compiled schedules of kernels and fusions, with uniform routing. Calculated: weights, caches, collectives' "
    "time, copies beside the kernels, bounds, and all layers from programs of a few. Launches of kernels take no time in it. "
    f"Decode steps see {DECODE_CONTEXT} tokens of each sequence, prefill steps are the first tokens of one."
)
Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the names of columns, and a line of cells for each row."""

    title: str
    columns: Cells
    lines: Sequence[Cells]

    def text(self) -> str:
        widths = [max(map(len, cells)) for cells in zip(self.columns, *self.lines, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (self.columns, *self.lines)]
        return "\n".join([f"{self.title}:", *lines])

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.lines]
        return "\n".join([f"### {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _head(row: Row) -> Cells:
    cell = row.cell
    return cell.model, cell.slice.name, f"{cell.step.phase} {cell.step.num_tokens}"


_HEAD = ("model", "slice", "step")


def times(rows: Sequence[Row]) -> Table:
    columns = (*_HEAD, "experts", "step ms", "bound ms", "by", "ratio", "MoE", "attention", "other", "waiting", "simulated", "not timed")  # fmt: skip
    return Table("A step, modelled", columns, [_times(row) for row in rows])


def _times(row: Row) -> Cells:
    found = row.figures
    step, parts = found["step_us"], found["by_part"]
    attention = parts.get(ATTENTION, 0.0) + parts.get(RECURRENT, 0.0)
    moe = parts.get(MOE, 0.0)
    marks = {"unread": "u", "unknown": "o", "loops": "w"}
    return (
        *_head(row), _way(found), f"{step / 1e3:.2f}", f"{found['bound_us'] / 1e3:.2f}", found["bound_by"],
        f"{step / found['bound_us']:.1f}", _share(moe, step), _share(attention, step), _share(step - moe - attention, step),
        _share(found["waiting_us"], step), _share(found["by_origin"].get("simulated", 0.0), step),
        "".join(mark for name, mark in marks.items() if found[name]) or "-",
    )  # fmt: skip


def _way(found: Mapping[str, Any]) -> str:
    moe = found["moe"]
    return "-" if moe is None else f"{moe['way']} {moe['format']}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def memory(rows: Sequence[Row]) -> Table:
    kinds = dict.fromkeys(kind for row in rows for kind in row.figures["memory"]["weights"])
    columns = (*_HEAD, *kinds, "caches", "sampler", "temporaries", "code", "device", "tokens in caches")
    return Table("GiB on each device", columns, [_memory(row, tuple(kinds)) for row in rows])


def _memory(row: Row, kinds: Cells) -> Cells:
    found, made = row.figures["memory"], row.figures["bytes"]
    sizes = [found["weights"].get(kind, 0) for kind in kinds]
    sizes += [found["caches"], found["sampler"], made["temporaries"], made["code"], found["device"]]
    held = found["cached_tokens"]
    step = row.cell.step
    enough = held >= step.num_sequences * step.context
    return *_head(row), *(f"{size / GIB:.2f}" for size in sizes), f"{held:,}{'' if enough else ' (too few)'}"


def program(rows: Sequence[Row]) -> Table:
    columns = (
        *_HEAD,
        "from",
        "collectives of a layer",
        "of the rest",
        "trace s",
        "compile s",
        "CPU s",
        "CPU s of a layer",
    )
    return Table("The program", columns, [_program(row) for row in rows])


def _program(row: Row) -> Cells:
    found = row.figures
    layers = "all layers" if found["is_whole"] else " and ".join(str(len(one)) for one in found["programs"]) + " layers"
    each = found["collectives_of_layer"]
    of_layers = "; ".join(f"{_kind(kind)}: {_collectives(some)}" for kind, some in each.items())
    rest = {name: list(counts) for name, counts in found["collectives"].items()}
    # What is left of all when the layers' are taken away.
    for kind, some in each.items():
        number = _num_layers(row, kind)
        for name, counts in some.items():
            rest[name] = [all_of - number * one for all_of, one in zip(rest[name], counts, strict=True)]
    slope = ", ".join(f"{_kind(kind)} {seconds:.0f}" for kind, seconds in found["compile_seconds_of_layer"].items())
    return (
        *_head(row), layers, of_layers or "-", _collectives({name: some for name, some in rest.items() if round(some[0], 1) > 0}),
        f"{found['seconds']['trace'][0]:.0f}", f"{found['seconds']['compile'][0]:.0f}", f"{found['seconds']['compile'][1]:.0f}", slope or "-",
    )  # fmt: skip


def _num_layers(row: Row, kind: str) -> int:
    return all_layers(row.cell.model).count(kind)


def _kind(kind: str) -> str:
    return kind.removesuffix("_attention")


def _collectives(some: Mapping[str, Sequence[float]]) -> str:
    """As "2 all-reduce 1.0 MiB", whatever part of the model they are of."""
    totals: dict[str, list[float]] = {}
    for name, (count, size) in some.items():
        total = totals.setdefault(name.split("/")[1], [0.0, 0.0])
        total[0] += count
        total[1] += size
    parts = [f"{count:g} {operation} {size / MIB:.2f} MiB" for operation, (count, size) in totals.items() if count > 0]
    return ", ".join(parts) or "none"


def parts(rows: Sequence[Row]) -> Table:
    lines = [(*_head(row), *(f"{row.figures['by_part'].get(part, 0.0) / 1e3:.2f}" for part in PARTS)) for row in rows]
    return Table("Milliseconds of a step by part of the model", (*_HEAD, *PARTS), lines)


_MARKS = (
    "Not timed: u, instructions whose schedule could not be read, taken at the rate of memory; o, kernels whose way depends on operands that are "
    "not known, so that theirs are those of some other call; w, loops whose turns are not known, counted once."
)


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [make(rows) for make in (times, parts, memory, program)] if rows else []


def _others(rows: Sequence[Row]) -> list[str]:
    return [f"{row.cell.label}  {row.outcome}: {row.reason}" for row in rows if row.outcome != COMPILED]


def text(rows: Sequence[Row]) -> str:
    """All tables, and what is missing in them."""
    done = [row for row in rows if row.outcome == COMPILED]
    return "\n\n".join([*(table.text() for table in _tables(done)), *_others(rows), _MARKS, NOTE])


def markdown(rows: Sequence[Row], command: str) -> str:
    """The same in Markdown, under the command that made it."""
    done = [row for row in rows if row.outcome == COMPILED]
    missing = [f"* {line}" for line in _others(rows)]
    made = ["## What was compiled", "", f"    {command}", "", NOTE, "", _MARKS, ""]
    if missing:
        made += ["Not in the tables:", "", *missing, ""]
    return "\n".join([*made, "\n\n".join(table.markdown() for table in _tables(done)), ""])


def short(program: Program) -> str:
    """A program on a line, for those who wait."""
    found = program.found
    if program.outcome != COMPILED:
        return f"{program.job.label}  {program.outcome}: {found['error']}"
    wall, processors = found["seconds"]["compile"]
    return (
        f"{program.job.label}  {found['walk']['us'] / 1e3:.2f} ms modelled, {found['bytes']['temporaries'] / MIB:.1f} MiB of temporaries, compiled in "
        f"{wall:.0f} s ({processors:.0f} s of processors)"
    )
