"""The table of `bench kernels`: a line for each cell, and what its figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tpu_serve.bench.kernel_cells import TENSOR_CORE, XLA, Kernel
from tpu_serve.bench.kernel_rows import Row
from tpu_serve.device.chip import MIB

NOTE = (
    "Compiled for the named chips and modelled from the compiled schedule; nothing here was measured on a TPU. "
    "Bytes and bundles are exact for uniform routing, microseconds are a model; the bound is calculated."
)
UNTIMED = {
    "unread": ("u", "kernels whose schedule could not be read: their bytes and time are missing"),
    "unknown": (
        "o",
        "kernels whose way depends on operands that are not known: their bytes and time are of another call",
    ),
    "loops": ("w", "loops or branches of XLA's: the kernels in them are counted once each"),
    "copies": (
        "c",
        "copies beside the kernels: their bytes are in HBM MB, their time is missing; > marks what is then a least time",
    ),
    "collectives": ("x", "collectives of XLA's: at most a part of their bytes and time is there"),
    "sparse core": ("s", "work that XLA gives to the SparseCore: its bytes and time are missing"),
}
"""What a program has beside what is modelled, by the kinds of `compiled.report.untimed`: a letter for the column and an explanation."""


def time_mark(row: Row) -> str | None:
    """What to write before a compiled row's modelled time: nothing, ">" where it is a least time, None where it says nothing.

    A kernel's time is always worth printing, even where XLA's operations around it are not all in it. An XLA program is nothing but
    those.
    """
    if row.cell.case.backend != XLA or not row.found.get("untimed"):
        return ""
    return ">" if set(row.found["untimed"]) == {"copies"} else None


def columns(kernel: Kernel) -> tuple[str, ...]:
    return (
        "cell", *kernel.columns, "model us", "bound us", "ratio", "of tc", "by", "HBM MB", "ICI MB", "MXU", "hot MXU", "hot spills",
        "temp MiB", "s", "untimed",
    )  # fmt: skip


def line(row: Row, rows: Mapping[tuple[str, str], Row] | None = None) -> tuple[str, ...]:
    """A compiled row's cells as text, in the order of `columns`.

    Args:
      rows: by kernel and subject, those of the kernel itself, which other backends are compared with ("of tc").
    """
    kernel, case, found = row.cell.kernel, row.cell.case, row.found
    every = [facts for facts in found["kernels"].values() if "error" not in facts]
    main = found["kernels"].get(found["main_kernel"], {})
    hot = main.get("hottest_loop") or {}
    least, mark = found.get("bound_us"), time_mark(row)
    modelled = None if mark is None else found["modelled_us"]
    other = (rows or {}).get((kernel.name, case.subject))
    theirs = other.found.get("modelled_us") if other is not None and case.backend != TENSOR_CORE else None
    hbm_bytes = sum(facts["hbm_bytes"] for facts in every) + found.get("copied_bytes", 0)
    return (
        case.label, *kernel.figures(case, row.config, found),
        _number(modelled, 0, mark), _number(least, 0), _number(modelled and least and modelled / least, 2, mark),
        _number(modelled and theirs and modelled / theirs, 2, mark),
        str(found.get("analytic", {}).get("limit") or found.get("bound_by", "")),
        f"{hbm_bytes / 1e6:.1f}", f"{sum(facts['ici_bytes'] for facts in every) / 1e6:.1f}",
        f"{main.get('mxu_busy', 0):.0%}", f"{hot.get('mxu_busy', 0):.0%}", f"{hot.get('spills', 0)}",
        f"{found['temporary_bytes'] / MIB:.1f}", f"{found['compile_seconds']:.0f}",
        "".join(UNTIMED[kind][0] for kind in UNTIMED if kind in found.get("untimed", {})),
    )  # fmt: skip


def _number(value: float | None, digits: int, mark: str | None = "") -> str:
    return f"{mark}{value:.{digits}f}" if value else "-"


def _reason(row: Row) -> str:
    return f"{row.cell.case.label}  {row.outcome}: {row.reason}"


def short(row: Row) -> str:
    """A row on a line of its own, for those who wait."""
    if row.outcome != "compiled":
        return _reason(row)
    named = zip(columns(row.cell.kernel)[1:], line(row)[1:], strict=True)
    return f"{row.cell.case.label}  " + ", ".join(f"{name} {value}" for name, value in named if value not in ("", "-"))


def text(rows: Sequence[Row]) -> str:
    """The tables, one for each kernel, and what they are."""
    kernels = {row.cell.kernel.name: row.cell.kernel for row in rows}
    out: list[str] = []
    for name, kernel in kernels.items():
        out += [f"{name}:"] if len(kernels) > 1 else []
        out += _table(kernel, [row for row in rows if row.cell.kernel is kernel])
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in ("compiled", "refused", "failed")}
    out.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    kinds = {kind for row in rows for kind in row.found.get("untimed", {})}
    out += [f"untimed {letter}: {words}." for kind, (letter, words) in UNTIMED.items() if kind in kinds]
    return "\n".join([*out, NOTE])


def _table(kernel: Kernel, rows: Sequence[Row]) -> list[str]:
    own = {
        (kernel.name, row.cell.case.subject): row
        for row in rows
        if row.outcome == "compiled" and row.cell.case.backend == TENSOR_CORE
    }
    names = columns(kernel)
    entries = [line(row, own) if row.outcome == "compiled" else None for row in rows]
    full = [names, *(entry for entry in entries if entry is not None)]
    # Columns of which no row makes use are left out.
    backends = {row.cell.case.backend for row in rows}
    unused = {"of tc"} if backends == {TENSOR_CORE} else set()
    unused |= {"untimed"} if not any(entry[-1] for entry in full[1:]) else set()
    shown = [place for place, name in enumerate(names) if name not in unused]
    widths = {place: max(len(entry[place]) for entry in full) for place in shown}

    def padded(entry: Sequence[str]) -> str:
        return "  ".join(entry[place].ljust(widths[place]) for place in shown).rstrip()

    return [
        padded(names),
        *(_reason(row) if entry is None else padded(entry) for row, entry in zip(rows, entries, strict=True)),
    ]
