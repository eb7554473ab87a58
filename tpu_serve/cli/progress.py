"""A progress bar on standard error, for people only: silent when that is not a terminal, unless asked for."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """Says which phase of starting is under way, then counts units of work. Use as a context manager.

    Args:
      total: units of work, None when unknown.
      unit: what they are called.
      shown: True or False decides; None shows it on a terminal.
    """

    def __init__(self, total: int | None, unit: str, shown: bool | None = None):
        self._total, self._unit = total, unit
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Any = None
        self._phase = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def phase(self, name: str, share: float) -> None:
        """The `on_phase` of `build_engine`."""
        if self._shown and name != self._phase:
            print(f"tpu-serve: {name} …", file=sys.stderr)
        self._phase = name

    def advance(self, note: str = "", count: int = 1) -> None:
        """Counts finished units and shows a note behind them. The clock runs from the first call, or from `start`."""
        self.start()
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)

    def skip(self) -> None:
        """Takes one unit off the total: it was done before."""
        if self._bar is not None and self._bar.total is not None:
            self._bar.total -= 1

    def start(self) -> None:
        """Shows the bar; harmless when it is there."""
        if self._shown and self._bar is None:
            import tqdm

            self._bar = tqdm.tqdm(total=self._total, unit=f" {self._unit}", file=sys.stderr, dynamic_ncols=True)
