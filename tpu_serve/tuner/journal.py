"""Every try of a run, a line of JSON each in the order of completion, behind a line that says what the file is."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tpu_serve.bench.kernel_journal import versions
from tpu_serve.config import ConfigError
from tpu_serve.moe_plan.key import config_to_json
from tpu_serve.tuner.jobs import Job
from tpu_serve.tuner.trial import FAILED, REFUSED, WORKED, Task, Trial
from tpu_serve.tuning_tables.typed import to_json

KIND = "tpu-serve tune"
NOTE = (
    "Scores are microseconds, lower is better. Of score_kind measured they are times on the device; schedule is modelled from the compiled "
    "schedule and bytes is calculated: these two were not measured."
)


class Journal:
    """A file that grows by a line for each try, so that those written survive whatever happens next. Use as a context manager.

    Methods may be called from several threads.

    Attributes:
      num_kept: tries of an earlier run that need not be done again: those that failed, by time or by a dead process, are.
    """

    def __init__(self, path: Path, *, resume: bool):
        """Opens a file, to be replaced or, with `resume` and if it is there, continued after its last complete line. Nothing in it changes
        before the context is entered.

        Raises:
          ConfigError: the file cannot be written, or cannot be continued.
        """
        self._kept: dict[str, Trial] = {}
        self._end = 0
        self._lock = threading.Lock()
        if path.exists() and not path.is_file():
            raise ConfigError(f"--journal {path} cannot be written: it is no file.")
        try:
            self._file: BinaryIO = path.open("r+b" if path.is_file() else "wb")
        except OSError as error:
            raise ConfigError(f"--journal {path} cannot be written: {error.strerror}.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"--journal {path} is being written by another process; name another one.") from None
        if resume and self._file.readable():
            try:
                self._read(path)
            except ConfigError:
                self._file.close()
                raise

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _read(self, path: Path) -> None:
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break  # the earlier run was cut off while writing it
            try:
                line = json.loads(raw)
                if number == 1:
                    _check_header(line, path)
                else:
                    self._take(json.dumps(line["what"]), Trial(**line["trial"]))
            except ConfigError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError):
                what = f"Its line {number} is not a try" if number > 1 else "It was not written by this command"
                raise ConfigError(f"--resume: {path} cannot be continued. {what}; name another --journal.") from None
            self._end += len(raw)

    def _take(self, what: str, trial: Trial) -> None:
        if trial.outcome not in (WORKED, REFUSED, FAILED) or (trial.outcome == WORKED) != isinstance(
            trial.score, float
        ):
            raise ValueError("no trial")
        self._kept.pop(what, None)
        if trial.outcome != FAILED:
            self._kept[what] = trial

    def __enter__(self) -> Journal:
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if self._end == 0:
            self._write({"kind": KIND, "versions": versions(), "note": NOTE})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._file.close()

    def kept(self, what: dict[str, Any]) -> Trial | None:
        """What came of a try, by `what_of`, if it is there and need not be done again."""
        return self._kept.get(json.dumps(what))

    def add(self, what: dict[str, Any], trial: Trial) -> None:
        """Writes a try and waits until it is on the disk.

        Raises:
          ConfigError: it is not.
        """
        self._write({"what": what, "trial": asdict(trial)})

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            if self._file.closed:  # a thread that learns late that all is over
                return
            try:
                self._file.write(json.dumps(line).encode() + b"\n")
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise ConfigError(f"--journal {self._file.name} cannot be written: {error.strerror}.") from None


def what_of(job: Job, task: Task, kind: str, routing: str, role: str, attempt: int) -> dict[str, Any]:
    """What a try is about, all that decides whether it is the same as another.

    Args:
      kind, routing: see `Executor`.
      role: "candidate", "control" or "xla".
      attempt: 2 for a job that is repeated.
    """
    return {
        "label": job.label, "kind": kind, "routing": routing, "role": role, "attempt": attempt, "chip": job.chip.name,
        "key": to_json(job.key), "config": None if task.config is None else config_to_json(task.config),
    }  # fmt: skip


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
            f"--resume: {path} was written with {', '.join(other)}; name another --journal, or leave --resume out to replace it."
        )
