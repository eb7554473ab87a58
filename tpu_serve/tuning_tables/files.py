"""Where tables lie: those of the package, and before them those of folders that the user names."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.tuning_tables.table import Table, dumps, parse
from tpu_serve.tuning_tables.typed import Malformed

K = TypeVar("K")
V = TypeVar("V")

SHIPPED = Path(__file__).parent
"""Folder of the tables that come with the package."""


def table_path(folder: Path, chip: str, kernel: str) -> Path:
    return folder / chip / f"{kernel}.json"


def read_table(path: Path, key: type[K], value: Callable[[Any, str], V]) -> Table[K, V]:
    """The table in a file; see `table.parse` for the arguments.

    Raises:
      ConfigError: it cannot be read, makes no sense, is about another chip or kernel than its place says, or about more or less VMEM than
        the chip has.
    """
    try:
        table = parse(path.read_text(encoding="utf-8"), key, value)
    except OSError as error:
        raise ConfigError(f"The tuning table {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The tuning table {path} is damaged: byte {error.start} is not UTF-8.") from None
    except Malformed as error:
        raise ConfigError(f"The tuning table {path} is damaged: {error}.") from None
    for name, found, wanted in (("device", table.device, path.parent.name), ("kernel", table.kernel, path.stem)):
        if found != wanted:
            raise ConfigError(
                f"The tuning table {path} is about the {name} {found!r}, not {wanted!r} as its place says."
            )
    chip = TPU_CHIPS.get(table.device)
    if chip is not None and table.vmem_bytes != chip.vmem_bytes:
        raise ConfigError(
            f"The tuning table {path} is for {table.vmem_bytes} bytes of VMEM; {chip.name} has {chip.vmem_bytes}."
        )
    return table


def read_tables(
    chip: str, kernel: str, folders: Sequence[Path], key: type[K], value: Callable[[Any, str], V]
) -> list[Table[K, V]]:
    """Tables of a chip, those of `folders` before the package's own. A file that is not there holds nothing.

    Raises:
      ConfigError: see `read_table`; or a folder that was named is not there.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--moe-tuning-dir {folder} is not a folder.")
        if (folder / f"{kernel}.json").is_file():
            raise ConfigError(f"--moe-tuning-dir {folder} is the folder of one chip; name the one that it lies in.")
    paths = [table_path(folder, chip, kernel) for folder in (*folders, SHIPPED)]
    return [read_table(path, key, value) for path in paths if path.is_file()]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes that ask the same from changing a table meanwhile.

    Raises:
      ConfigError: its folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.parent, os.O_RDONLY)  # no file of its own that would stay
    except OSError as error:
        raise ConfigError(f"The tuning table {path} cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_table(path: Path, table: Table[K, V], value: Callable[[V], dict[str, Any]]) -> None:
    """Writes a table so that the file is at any time the old one or the new one, whole.

    Raises:
      ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = path.resolve()  # a link stays one
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(dumps(table, value))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"The tuning table {path} cannot be written: {error.strerror}.") from None
