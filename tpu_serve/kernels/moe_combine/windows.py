"""Copies between the rows in HBM and a block's buffer in VMEM, and waiting for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_serve.kernels.moe_combine.problem import (
    EXPERTS_AT_A_TIME,
    FIELDS,
    Config,
    Problem,
    num_panels,
    padded_experts,
)


@dataclass(frozen=True)
class Windows:
    """One block's table in SMEM, see `tables.Tables`, and the panel to copy."""

    problem: Problem
    config: Config
    table: Any
    panel: Any

    @property
    def used(self) -> Any:
        """Granules of the buffer that all windows together take."""
        return self.table[0, 0, FIELDS * padded_experts(self.problem)]

    def _for_width(self, body: Any) -> None:
        """body(pl.ds of the panel's columns in HBM, their number); the last panel may be narrower than the others."""
        hidden, width, count = self.problem.hidden, self.config.panel, num_panels(self.problem, self.config)
        last = hidden - (count - 1) * width
        if count == 1:
            body(pl.ds(0, hidden), hidden)
        elif last == width:
            body(pl.ds(pl.multiple_of(self.panel * width, width), width), width)
        else:
            pl.when(self.panel < count - 1)(
                lambda: body(pl.ds(pl.multiple_of(self.panel * width, width), width), width)
            )
            pl.when(self.panel == count - 1)(lambda: body(pl.ds((count - 1) * width, last), last))

    def _for_windows(self, body: Any) -> None:
        """body(window) for each expert that the block has a window of."""

        def some(group: Any, _: None) -> None:
            # All reads come before the first copy, behind which the compiler would not move them.
            first = group * EXPERTS_AT_A_TIME
            windows = [
                Window(*(self.table[0, 0, (first + one) * FIELDS + field] for field in range(FIELDS)))
                for one in range(EXPERTS_AT_A_TIME)
            ]
            for window in windows:
                pl.when(window.size > 0)(functools.partial(body, window))

        jax.lax.fori_loop(0, padded_experts(self.problem) // EXPERTS_AT_A_TIME, some, None)

    def read(self, rows: Any, buffer: Any, semaphore: Any) -> None:
        """Starts copying all windows from `rows` to the `buffer` [J, P]."""

        def body(columns: Any, width: int) -> None:
            copy = functools.partial(self._copy, rows, buffer, columns, width, semaphore, True)
            self._for_windows(lambda window: copy(window.first, window.place, window.size))

        self._for_width(body)

    def write(self, buffer: Any, rows: Any, semaphore: Any) -> None:
        """Starts copying all windows from the `buffer` to `rows`."""

        def body(columns: Any, width: int) -> None:
            copy = functools.partial(self._copy, rows, buffer, columns, width, semaphore, False)
            self._for_windows(lambda window: copy(window.first, window.place, window.size))

        self._for_width(body)

    def stage(self, rows: Any, buffer: Any, semaphore: Any) -> None:
        """Starts copying those granules from `rows` to the `buffer` that hold rows of earlier blocks."""

        def body(columns: Any, width: int) -> None:
            copy = functools.partial(self._copy, rows, buffer, columns, width, semaphore, True)

            def ends(window: Window) -> None:
                last = window.size - 1
                pl.when(window.head > 0)(lambda: copy(window.first, window.place, 1))
                pl.when(window.tail > 0)(lambda: copy(window.first + last, window.place + last, 1))

            self._for_windows(ends)

        self._for_width(body)

    def _rows(self, granule: Any, size: Any) -> Any:
        align = self.problem.align
        return pl.ds(
            granule * align if isinstance(granule, int) else pl.multiple_of(granule * align, align),
            size * align if isinstance(size, int) else pl.multiple_of(size * align, align),
        )

    def _copy(
        self, rows: Any, buffer: Any, columns: Any, width: int, semaphore: Any, inward: bool,
        first: Any, place: Any, size: Any,
    ) -> None:  # fmt: skip
        outside = rows.at[self._rows(first, size), *_columns(rows, columns)]
        inside = buffer.at[self._rows(place, size), *_columns(buffer, pl.ds(0, width))]
        source, target = (outside, inside) if inward else (inside, outside)
        pltpu.make_async_copy(source, target, semaphore).start()

    def wait(self, buffer: Any, semaphore: Any) -> None:
        """Waits for the copies of all windows."""
        self._wait(self.used, buffer, semaphore)

    def wait_staged(self, buffer: Any, semaphore: Any) -> None:
        """Waits for the copies that `stage` started."""
        self._wait(self.table[0, 0, FIELDS * padded_experts(self.problem) + 1], buffer, semaphore)

    def _wait(self, granules: Any, buffer: Any, semaphore: Any) -> None:
        def body(_: Any, width: int) -> None:
            arrived = buffer.at[self._rows(0, granules), *_columns(buffer, pl.ds(0, width))]
            pl.when(granules > 0)(lambda: pltpu.make_async_copy(arrived, arrived, semaphore).wait())

        self._for_width(body)


class Window(NamedTuple):
    """An entry of the table, scalars; see `tables.py`."""

    first: Any
    size: Any
    place: Any
    head: Any
    tail: Any


def _columns(array: Any, columns: Any) -> tuple[Any, ...]:
    """The index of columns behind that of rows: all of them where a row lies for itself, [R, H / 128, 128]."""
    return (columns,) if len(array.shape) == 2 else ()
