"""The file in which `bench models` keeps what it found about programs, in the order of completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_serve.bench import journal_file
from tpu_serve.bench.journal_file import Contents, JournalFile
from tpu_serve.bench.models.cells import Cell
from tpu_serve.bench.models.programs import FAILED, Program

NOTE = (
    "Compiled for the named slices and modelled from the compiled schedules; nothing here was measured on a TPU. Bytes of temporaries and code, "
    "collectives and seconds of this machine are the compiler's; times of steps are simulated or calculated."
)
CONTENTS = Contents("tpu-serve bench models", NOTE, "--output", "program")


class Journal(journal_file.Journal):
    """A `JournalFile` of programs. Use as a context manager.

    Attributes:
      kept: programs of an earlier run, those that failed left out.
    """

    def __init__(self, path: Path, cells: Sequence[Cell], *, resume: bool):
        """Opens a file, to be replaced or, with `resume` and if it is there, continued. Nothing in it changes before the context is entered.

        Raises:
          ConfigError: the file cannot be written, or cannot be continued.
        """
        self.kept: dict[Cell, Program] = {}
        self._cells = cells
        super().__init__(JournalFile(path, CONTENTS, self._take if resume else None))

    def _take(self, line: dict[str, Any]) -> None:
        asked, found = line["cell"], line["found"]
        for cell in self._cells:
            if cell.as_json() == asked:
                self.kept.pop(cell, None)
                program = Program(cell, found)
                if program.outcome != FAILED:
                    self.kept[cell] = program

    def add(self, program: Program) -> None:
        """Writes a program and waits until it is on the disk.

        Raises:
          ConfigError: it is not.
        """
        self._file.write({"cell": program.cell.as_json(), "found": program.found})
