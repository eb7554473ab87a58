"""The tables of `bench models`, as text and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.models.cells import Cell
from tpu_serve.bench.models.parts import ATTENTION, MOE, PARTS, RECURRENT
from tpu_serve.bench.models.programs import COMPILED, Program
from tpu_serve.bench.models.step import DECODE_CONTEXT
from tpu_serve.device.chip import GIB, MIB

NOTE = (
    "Nothing here was measured on a TPU. Compiled: temporaries, code, collectives, seconds (of a processor of the machine that compiled, the "
    "compiler's dump included). Simulated: the compiled schedules of kernels and fusions, with uniform routing. Calculated: weights, caches, collectives' "
    "time, copies beside the kernels, and bounds. Launches of kernels take no time in it. "
    f"Decode steps see {DECODE_CONTEXT} tokens of each sequence, prefill steps are the first tokens of one."
)
_MARKS = (
    "Not timed: u, instructions whose schedule could not be read, taken at the rate of memory; o, kernels whose way depends on operands that are "
    "not known, so that theirs are those of some other call; w, loops whose turns are not known, counted once."
)
_PAGE = """\
# What the TPU compiler makes of whole models

```bash
{command}
```

wrote this page. It compiles the steps of published models, all layers of them, ahead of time for slices that are not there, from their config.json alone,
and walks the compiled schedules. {note}

{versions}

{tables}

{marks} Waiting: for copies and asynchronous collectives that are not done when their result is needed. Bytes of collectives are those of their results on
a device. Caches get what the plan of a server leaves them: what its most demanding step is calculated to take stays free of them, whatever this step takes.
"""
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A title, the names of columns, and a line of words for each row."""

    title: str
    columns: Words
    lines: Sequence[Words]

    def text(self) -> str:
        widths = [max(map(len, words)) for words in zip(self.columns, *self.lines, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in (self.columns, *self.lines)]
        return "\n".join([f"{self.title}:", *lines])

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.lines]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


_HEAD = ("model", "slice", "step")


def _head(program: Program) -> Words:
    cell = program.cell
    return cell.model, cell.slice.name, f"{cell.step.phase} {cell.step.num_tokens}"


def times(programs: Sequence[Program]) -> Table:
    columns = (*_HEAD, "experts", "step ms", "bound ms", "by", "ratio", "MoE", "attention", "rest", "waiting", "simulated", "not timed")  # fmt: skip
    return Table("A step, modelled", columns, [_times(program) for program in programs])


def _times(program: Program) -> Words:
    found = program.found
    walk, seconds = found["walk"], found["bound"]["seconds"]
    step, parts = walk["us"], walk["by_part"]
    attention = parts.get(ATTENTION, 0.0) + parts.get(RECURRENT, 0.0)
    moe = parts.get(MOE, 0.0)
    limit = max(seconds, key=seconds.__getitem__)
    marks = {"unread": "u", "unknown": "o", "loops": "w"}
    return (
        *_head(program), _way(found), f"{step / 1e3:.2f}", f"{seconds[limit] * 1e3:.2f}", limit, f"{step / seconds[limit] / 1e6:.1f}",
        _share(moe, step), _share(attention, step), _share(step - moe - attention, step), _share(walk["waiting_us"], step),
        _share(walk["by_origin"].get("simulated", 0.0), step), "".join(mark for name, mark in marks.items() if walk[name]) or "-",
    )  # fmt: skip


def _way(found: Mapping[str, Any]) -> str:
    moe = found["moe"]
    return "-" if moe is None else f"{moe['way']} {moe['format']}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def parts(programs: Sequence[Program]) -> Table:
    lines = [
        (*_head(one), *(f"{one.found['walk']['by_part'].get(part, 0.0) / 1e3:.2f}" for part in PARTS))
        for one in programs
    ]
    return Table("Milliseconds of a step by part of the model", (*_HEAD, *PARTS), lines)


def memory(programs: Sequence[Program]) -> Table:
    kinds = dict.fromkeys(kind for one in programs for kind in one.found["memory"]["weights"])
    columns = (*_HEAD, *kinds, "caches", "sampler", "temporaries", "code", "sum", "device", "tokens in caches")
    return Table("GiB on each device", columns, [_memory(one, tuple(kinds)) for one in programs])


def _memory(program: Program, kinds: Words) -> Words:
    found, made = program.found["memory"], program.found["bytes"]
    sizes = [found["weights"].get(kind, 0) for kind in kinds]
    sizes += [found["caches"], found["sampler"], made["temporaries"], made["code"]]
    held, step, device = found["cached_tokens"], program.cell.step, found["device"]
    whole = f"{sum(sizes) / GIB:.2f}{'' if sum(sizes) <= device else ' (too much)'}"
    tokens = f"{held:,}{'' if held >= step.num_sequences * step.context else ' (too few)'}"
    return *_head(program), *(f"{size / GIB:.2f}" for size in sizes), whole, f"{device / GIB:.2f}", tokens


def compiling(programs: Sequence[Program]) -> Table:
    columns = (*_HEAD, *PARTS, "trace s", "compile s")
    return Table(
        "Collectives by part of the model, and seconds of processors to trace and compile",
        columns,
        [_compiling(one) for one in programs],
    )


def _compiling(program: Program) -> Words:
    seconds, found = program.found["seconds"], program.found["walk"]["collectives"]
    words = []
    for part in PARTS:
        mine = {name.split("/")[1]: counts for name, counts in found.items() if name.split("/")[0] == part}
        words.append(", ".join(f"{count:g} {name} {size / MIB:.2f} MiB" for name, (count, size) in mine.items()) or "-")
    return *_head(program), *words, *(f"{seconds[phase][1]:.0f}" for phase in ("trace", "compile"))


def _tables(programs: Sequence[Program]) -> list[Table]:
    return [make(programs) for make in (times, parts, memory, compiling)] if programs else []


def _done(cells: Sequence[Cell], programs: Mapping[Cell, Program]) -> list[Program]:
    """By model, each in the order of steps."""
    done = [programs[cell] for cell in cells if cell in programs and programs[cell].outcome == COMPILED]
    models = list(dict.fromkeys((cell.model, cell.slice) for cell in cells))
    return sorted(
        done,
        key=lambda one: (models.index((one.cell.model, one.cell.slice)), one.cell.step.phase, one.cell.step.num_tokens),
    )


def _others(cells: Sequence[Cell], programs: Mapping[Cell, Program]) -> list[str]:
    """A line for each program that did not compile, and one for those of a model that nobody has compiled yet."""
    found = [programs[cell] for cell in cells if cell in programs]
    lines = [f"{one.cell.label}: {one.outcome}, {one.found['error']}" for one in found if one.outcome != COMPILED]
    missing: dict[str, list[str]] = {}
    for cell in cells:
        if cell not in programs:
            missing.setdefault(f"{cell.model} {cell.slice.name}", []).append(
                f"{cell.step.phase} {cell.step.num_tokens}"
            )
    return lines + [f"{model}: {', '.join(steps)} not compiled yet" for model, steps in missing.items()]


def text(cells: Sequence[Cell], programs: Mapping[Cell, Program]) -> str:
    """All tables, and what is missing in them."""
    tables = (table.text() for table in _tables(_done(cells, programs)))
    return "\n\n".join([*tables, *_others(cells, programs), _MARKS, NOTE])


def page(
    cells: Sequence[Cell], programs: Mapping[Cell, Program], command: str, versions: Mapping[str, str | None]
) -> str:
    """The same in Markdown, under the command that made it."""
    tables = [table.markdown() for table in _tables(_done(cells, programs))]
    if missing := _others(cells, programs):
        tables.append("\n".join(["## Not in the tables", "", *(f"- {line}" for line in missing)]))
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return _PAGE.format(
        command=command, note=NOTE, versions=f"Versions: {named}.", tables="\n\n".join(tables), marks=_MARKS
    )


def short(program: Program) -> str:
    """A program on a line, for those who wait."""
    found = program.found
    if program.outcome != COMPILED:
        return f"{program.cell.label}  {program.outcome}: {found['error']}"
    wall, processors = found["seconds"]["compile"]
    return (
        f"{program.cell.label}  {found['walk']['us'] / 1e3:.2f} ms modelled, {found['bytes']['temporaries'] / MIB:.1f} MiB of temporaries, compiled in "
        f"{wall:.0f} s ({processors:.0f} s of processors)"
    )
