"""Line charts as SVG, drawn here: curves over a linear or logarithmic axis, with marks where something changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 20, 46
NUM_COLOURS = 8
"""Of the page's style, `--series-1` and so on; curves beyond them begin again, dashed."""
_MOST_TICKS = 7
_LETTER = 6.2
"""Width of a small letter in pixels, about."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place on a curve. `label` is written beside it where there is room, `note` is shown when it is pointed at."""

    x: float
    y: float
    label: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in the order in which they are joined."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a few words."""

    x: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the same axes. A logarithmic axis has values above 0 only; axes that are not begin at 0."""

    title: str
    x_title: str
    y_title: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    has_log_x: bool = False
    has_log_y: bool = False

    def svg(self) -> str:
        """The picture without its title and legend; colours are those of the page's style."""
        points = [point for curve in self.curves for point in curve.points]
        across = _Axis.of([point.x for point in points], LEFT, WIDTH - RIGHT, is_log=self.has_log_x, is_exact=True)
        up = _Axis.of([point.y for point in points], HEIGHT - BOTTOM, TOP, is_log=self.has_log_y)
        parts = [*self._frame(across, up), *self._marks(across)]
        labels: list[tuple[float, float, float]] = []
        for number, curve in enumerate(self.curves):
            parts += _curve(number, curve, across, up, labels)
        name = escape(f"{self.title}: {self.y_title} by {self.x_title}", quote=True)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'

    def _frame(self, across: _Axis, up: _Axis) -> list[str]:
        floor = HEIGHT - BOTTOM
        parts = []
        for value in up.ticks:
            y = up.place(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y + 4:.1f}">{_short(value)}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
        for value in across.ticks:
            x = across.place(value)
            parts.append(f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{floor + 18}">{_short(value)}</text>')
        middle, height = (LEFT + WIDTH - RIGHT) / 2, (TOP + floor) / 2
        parts.append(
            f'<text class="name" text-anchor="middle" x="{middle}" y="{HEIGHT - 8}">{escape(self.x_title)}</text>'
        )
        parts.append(
            f'<text class="name" text-anchor="middle" transform="translate(14 {height}) rotate(-90)">{escape(self.y_title)}</text>'
        )
        return parts

    def _marks(self, across: _Axis) -> list[str]:
        parts = []
        for row, mark in enumerate(self.marks):
            x, y = across.place(mark.x), TOP + 10 + 13 * row
            is_right = x + 6 + _LETTER * len(mark.text) > WIDTH - RIGHT
            side, anchor = (-5, "end") if is_right else (5, "start")
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(
                f'<text class="label" text-anchor="{anchor}" x="{x + side:.1f}" y="{y}">{escape(mark.text)}</text>'
            )
        return parts


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from `low` to `high` between two places in pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: Sequence[float]

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float, *, is_log: bool, is_exact: bool = False) -> _Axis:
        """Around some values.

        Args:
          is_exact: of a logarithmic axis: ticks are the values themselves where they are few.
        """
        if not is_log:
            ticks = linear_ticks(max(values))
            return cls(0.0, ticks[-1], start, end, False, ticks)
        low, high = min(values), max(values)
        few = sorted(set(values))
        if is_exact and len(few) <= 2 * _MOST_TICKS:
            ticks = few
        else:
            ticks = log_ticks(low, high)
            low, high = min(low, ticks[0]), max(high, ticks[-1])
        pad = (high / low) ** 0.04 if high > low else 2.0
        return cls(low / pad, high * pad, start, end, True, ticks)

    def place(self, value: float) -> float:
        """In pixels."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def linear_ticks(most: float) -> list[float]:
    """Round values from 0 to the first one that is not below `most`."""
    if not most > 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(most / (_MOST_TICKS - 1)))
    step = next(size * times for times in (1, 2, 5, 10) if most <= size * times * (_MOST_TICKS - 1) * (1 + 1e-9))
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or only the powers, around two values above 0."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-12)
    every = [10.0**power * times for power in range(first, last + 1) for times in (1, 2, 5)]
    start = max(place for place, value in enumerate(every) if value <= low * (1 + 1e-9))
    end = next((place for place, value in enumerate(every) if value >= high * (1 - 1e-9)), len(every) - 1)
    ticks = every[start : end + 1] if end > start else every[start : start + 2]
    if len(ticks) > _MOST_TICKS + 2:
        return [10.0**power for power in range(first, last + 1)]
    return ticks


def _curve(number: int, curve: Curve, across: _Axis, up: _Axis, labels: list[tuple[float, float, float]]) -> list[str]:
    """A curve with its points; `labels` are the places (left, right, y) of texts so far, and gets those that are written."""
    places = [(across.place(point.x), up.place(point.y)) for point in curve.points]
    colour = f"var(--series-{number % NUM_COLOURS + 1})"
    dashes = ' stroke-dasharray="6 4"' if number >= NUM_COLOURS else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="curve" style="stroke:{colour}"{dashes} points="{path}"/>'] if len(places) > 1 else []
    for point, (x, y) in zip(curve.points, places, strict=True):
        note = escape(": ".join(filter(None, (curve.name, point.note))))
        parts.append(f'<circle class="point" style="fill:{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">')
        parts.append(f"<title>{note}</title></circle>")
        left, right, line = x + 7, x + 7 + _LETTER * len(point.label), y - 6
        is_free = all(right < begin or left > end or abs(line - other) > 11 for begin, end, other in labels)
        if point.label and is_free and right <= WIDTH:
            labels.append((left, right, line))
            parts.append(f'<text class="label" x="{left:.1f}" y="{line:.1f}">{escape(point.label)}</text>')
    return parts


def _short(value: float) -> str:
    """As few letters as say it: 15000 is 15k."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
