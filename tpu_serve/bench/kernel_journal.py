"""The file in which the rows of `bench kernels` are kept: JSON Lines, first what it is, then a row a line in the order of completion."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tpu_serve import __version__
from tpu_serve.bench.kernel_cells import Cell
from tpu_serve.bench.kernel_rows import Row
from tpu_serve.bench.kernel_table import NOTE
from tpu_serve.config import ConfigError

KIND = "tpu-serve bench kernels"


def versions() -> dict[str, str | None]:
    """Of what decides about a row; libtpu None where it is not installed."""
    try:
        libtpu = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        libtpu = None
    return {"jax": importlib.metadata.version("jax"), "libtpu": libtpu, "tpu_serve": __version__}


class Journal:
    """A file that grows by a line for each row, so that those written survive whatever happens next. Use as a context manager.

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
        self._end = 0
        try:
            self._file: BinaryIO = path.open("r+b" if path.is_file() else "wb")
        except OSError as error:
            raise ConfigError(f"--output-json {path} cannot be written: {error.strerror}.") from None
        if resume and self._file.readable():
            try:
                self._read(path, {cell.key: cell for cell in cells}, mode)
            except ConfigError:
                self._file.close()
                raise

    def _read(self, path: Path, cells: dict[tuple[str, str], Cell], mode: str | None) -> None:
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break  # the earlier run was cut off while writing it
            try:
                line = json.loads(raw)
                if number == 1:
                    _check_header(line, path)
                else:
                    self._take(line, cells, mode)
            except ConfigError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                what = f"Its line {number} is not a row" if number > 1 else "It was not written by this command"
                raise ConfigError(
                    f"--resume: {path} cannot be continued. {what}; name another --output-json."
                ) from None
            self._end += len(raw)

    def _take(self, line: dict[str, Any], cells: dict[tuple[str, str], Cell], mode: str | None) -> None:
        key = line["kernel"], line["label"]
        found = line["mode"], line["outcome"], line["reason"], line["config"], line["report"]
        if key not in cells or line["mode"] != mode:
            return
        self.kept.pop(key, None)
        if line["outcome"] != "failed":
            self.kept[key] = Row(cells[key], *found)

    def __enter__(self) -> Journal:
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if self._end == 0:
            self._write({"kind": KIND, "versions": versions(), "note": NOTE})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Writes a row and waits until it is on the disk.

        Raises:
          ConfigError: it is not.
        """
        self._write(row.as_json())

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(f"--output-json {self._file.name} cannot be written: {error.strerror}.") from None


def _check_header(line: dict[str, Any], path: Path) -> None:
    """Raises:
    ConfigError: the file is of other versions.
    ValueError, KeyError, TypeError, AttributeError: it is no header.
    """
    if line["kind"] != KIND:
        raise ValueError("another kind of file")
    now = versions()
    other = [
        f"{name} {line['versions'].get(name)} (here {now[name]})"
        for name in now
        if line["versions"].get(name) != now[name]
    ]
    if other:
        raise ConfigError(
            f"--resume: {path} was written with {', '.join(other)}; name another --output-json, or leave --resume out to replace it."
        )
