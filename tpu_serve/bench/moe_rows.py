"""What `bench moe` found, and the table of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpu_serve.bench.moe_cases import BACKENDS, Case
from tpu_serve.bench.report import percentile, table

EMPTY = "empty"
"""Name of the program that has the same arguments and computes nothing."""

MOST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Of the backends' results, as a share of the largest value: beyond it they do not compute the same layer."""

HEADINGS = (
    "layer", "type", "tokens", "padding", *(heading for name in BACKENDS for heading in (f"{name} ms", "middle half")), "empty ms",
    "dense/ragged", "fastest", "plan takes", "plan/fastest",
)  # fmt: skip

NOTES = (
    "Compared: dense (every expert on every token), ragged (rows sorted by expert, then a loop over blocks of rows) and gathered (every expert in use on "
    "every token) do the same",
    "sums in code that XLA compiled for this CPU. They are called in turn in one process, with the same random tokens and routing. Times are medians, and half of the samples lie in "
    "the middle half; '?'",
    "says that the middle halves of the fastest one and another overlap. An empty call has the same arguments and computes nothing; it is part of every time.",
    "Not compared: the fused and grouped kernels. A CPU only simulates them, and their times there say nothing about a TPU. Neither does this table.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
      samples_ms: of each of `BACKENDS` and of `EMPTY`, in order of the rounds.
      chosen: the backend that the server takes.
      difference: between the backends' results, as a share of the largest value.
    """

    case: Case
    samples_ms: Mapping[str, tuple[float, ...]]
    chosen: str
    difference: float

    def median(self, name: str) -> float:
        """In milliseconds."""
        return percentile(self.samples_ms[name], 50)

    def middle_half(self, name: str) -> tuple[float, float]:
        """First and third quartile in milliseconds."""
        return percentile(self.samples_ms[name], 25), percentile(self.samples_ms[name], 75)

    @property
    def ratio(self) -> float:
        """Time of dense, in times of ragged."""
        return self.median("dense") / self.median("ragged")

    @property
    def fastest(self) -> str:
        return min(BACKENDS, key=self.median)

    @property
    def is_clear(self) -> bool:
        """Whether the others' middle halves begin only after the fastest one's ends."""
        others = [name for name in BACKENDS if name != self.fastest]
        return all(self.middle_half(self.fastest)[1] < self.middle_half(name)[0] for name in others)

    @property
    def loss(self) -> float:
        """Time of the backend that is chosen, in times of the fastest one; 1 when that is chosen."""
        return self.median(self.chosen) / self.median(self.fastest)


def text(rows: Sequence[Row]) -> str:
    """The table, what it compares, warnings and the verdict. There is at least one row."""
    layers = dict.fromkeys(row.case.layer for row in rows)
    lines = [*(f"{layer.name}: {layer}" for layer in layers), ""]
    lines += [table(HEADINGS, [_cells(row) for row in rows]), "", *NOTES, ""]
    return "\n".join([*lines, *(f"WARNING: {warning}" for warning in warnings(rows)), verdict(rows)])


def warnings(rows: Sequence[Row]) -> list[str]:
    """Reasons to distrust the figures."""
    return [
        f"{_name(row.case)}: the results differ by {row.difference:.2g} of the largest value: they are not the same layer."
        for row in rows
        if not row.difference <= MOST_DIFFERENCE[row.case.dtype]  # also where it is not a number
    ]


def verdict(rows: Sequence[Row]) -> str:
    """One line: how much slower the plan's choices are than the fastest ones."""
    mean = math.exp(math.fsum(math.log(row.loss) for row in rows) / len(rows))
    worst = max(rows, key=lambda row: row.loss)
    missed = sum(row.loss > 1 for row in rows)
    line = f"The plan takes the fastest one in {len(rows) - missed} of {len(rows)} rows"
    if not missed:
        return f"{line}: it loses nothing."
    return (
        f"{line}; its choices take {mean:.2f} times the time of the fastest ones (geometric mean), {worst.loss:.2f} times at worst "
        f"({_name(worst.case)})."
    )


def _name(case: Case) -> str:
    return f"{case.layer.name}, {case.dtype}, {case.num_tokens} token{'s' * (case.num_tokens > 1)}"


def _cells(row: Row) -> list[str]:
    case = row.case
    times = [cell for name in BACKENDS for cell in (_ms(row.median(name)), " - ".join(map(_ms, row.middle_half(name))))]
    return [
        case.layer.name,
        case.dtype,
        str(case.num_tokens),
        str(case.num_padding),
        *times,
        _ms(row.median(EMPTY)),
        f"{row.ratio:.2f}",
        row.fastest + ("" if row.is_clear else "?"),
        row.chosen,
        f"{row.loss:.2f}",
    ]


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
