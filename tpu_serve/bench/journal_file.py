"""A file of JSON Lines that a long run writes as it goes, and a later run continues: first what it is, then a line for everything that is done."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from tpu_serve import __version__
from tpu_serve.config import ConfigError


def versions() -> dict[str, str | None]:
    """Of what decides about what is found; libtpu None where it is not installed."""
    try:
        libtpu = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        libtpu = None
    return {"jax": importlib.metadata.version("jax"), "libtpu": libtpu, "tpu_serve": __version__}


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file is about.

    Attributes:
      kind: the command, by which a file is known.
      note: what its numbers mean.
      flag: that names the file, for messages.
      line: what a line is, as in "not a row".
    """

    kind: str
    note: str
    flag: str
    line: str


class JournalFile:
    """The file, open. It grows by a line at a time, so that those written survive whatever happens next. Methods may be called from several
    threads; a second process that asks for the same file is refused.

    Nothing in the file changes before `begin`.
    """

    def __init__(self, path: Path, contents: Contents, take: Callable[[dict[str, Any]], None] | None):
        """
        Args:
          take: of a file to be continued, is given every complete line after the first, and raises ValueError, KeyError, TypeError or
            AttributeError where it is none of its kind. None for a file to be replaced.

        Raises:
          ConfigError: the file cannot be written, or cannot be continued.
        """
        self._contents, self._path = contents, path
        self._end = 0
        self._lock = threading.Lock()
        if path.exists() and not path.is_file():
            raise ConfigError(f"{contents.flag} {path} cannot be written: it is no file.")
        try:
            self._file: BinaryIO = path.open("r+b" if path.is_file() else "wb")
        except OSError as error:
            raise ConfigError(f"{contents.flag} {path} cannot be written: {error.strerror}.") from None
        try:
            self._only_writer()
            if take is not None and self._file.readable():
                self._read(take)
        except ConfigError:
            self._file.close()
            raise

    def _only_writer(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            flag = self._contents.flag
            raise ConfigError(f"{flag} {self._path} is being written by another process; name another one.") from None
        except OSError:
            pass  # a file system without locks

    def _read(self, take: Callable[[dict[str, Any]], None]) -> None:
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break  # the earlier run was cut off while writing it
            try:
                line = json.loads(raw)
                if number == 1:
                    self._check_header(line)
                else:
                    take(line)
            except ConfigError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                of = self._contents
                what = f"Its line {number} is not a {of.line}" if number > 1 else "It was not written by this command"
                raise ConfigError(
                    f"--resume: {self._path} cannot be continued. {what}; name another {of.flag}."
                ) from None
            self._end += len(raw)

    def _check_header(self, line: dict[str, Any]) -> None:
        if line["kind"] != self._contents.kind:
            raise ValueError("another kind of file")
        now = versions()
        other = [
            f"{name} {line['versions'].get(name)} (here {now[name]})"
            for name in now
            if line["versions"].get(name) != now[name]
        ]
        if other:
            raise ConfigError(
                f"--resume: {self._path} was written with {', '.join(other)}; name another {self._contents.flag}, or leave --resume out to "
                f"replace it."
            )

    def begin(self) -> None:
        """Cuts off what is not kept, and says what the file is where it says nothing yet.

        Raises:
          ConfigError: it cannot be written.
        """
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if self._end == 0:
            self.write({"kind": self._contents.kind, "versions": versions(), "note": self._contents.note})

    def write(self, line: dict[str, Any]) -> None:
        """Writes a line and waits until it is on the disk. Does nothing once the file is closed.

        Raises:
          ConfigError: it is not.
        """
        with self._lock:
            if self._file.closed:  # a thread that learns late that all is over
                return
            try:
                self._file.write(json.dumps(line).encode() + b"\n")
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise ConfigError(f"{self._contents.flag} {self._path} cannot be written: {error.strerror}.") from None

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Journal:
    """What keeps things of one kind in a `JournalFile`. Use as a context manager: nothing in the file changes before the context is entered.

    Args:
      file: to be written.
    """

    def __init__(self, file: JournalFile):
        self._file = file

    def __enter__(self) -> Self:
        self._file.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
