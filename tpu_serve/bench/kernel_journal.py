"""The file in which the rows of `bench kernels` are kept, in the order of completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_serve.bench import journal_file
from tpu_serve.bench.journal_file import Contents, JournalFile
from tpu_serve.bench.kernel_cells import Cell
from tpu_serve.bench.kernel_rows import Row
from tpu_serve.bench.kernel_table import NOTE

CONTENTS = Contents("tpu-serve bench kernels", NOTE, "--output-json", "row")


class Journal(journal_file.Journal):
    """A `JournalFile` of rows. Use as a context manager.

    Attributes:
      kept: rows of an earlier run by `Cell.key`, those that failed left out.
    """

    def __init__(self, path: Path, cells: Sequence[Cell], mode: str | None, *, resume: bool):
        """Opens a file, to be replaced or, with `resume` and if it is there, continued after its last complete line. Nothing in it
        changes before the context is entered.

        Args:
          cells, mode: rows of others stay in the file and are not kept.

        Raises:
          ConfigError: the file cannot be written, or cannot be continued.
        """
        self.kept: dict[tuple[str, str], Row] = {}
        self._cells, self._mode = {cell.key: cell for cell in cells}, mode
        super().__init__(JournalFile(path, CONTENTS, self._take if resume else None))

    def _take(self, line: dict[str, Any]) -> None:
        key = line["kernel"], line["label"]
        found = line["mode"], line["outcome"], line["reason"], line["config"], line["report"]
        if key not in self._cells or line["mode"] != self._mode:
            return
        self.kept.pop(key, None)
        if line["outcome"] != "failed":
            self.kept[key] = Row(self._cells[key], *found)

    def add(self, row: Row) -> None:
        """Writes a row and waits until it is on the disk.

        Raises:
          ConfigError: it is not.
        """
        self._file.write(row.as_json())
