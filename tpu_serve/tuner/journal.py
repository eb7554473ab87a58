"""Every try of a run, in the order of completion."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpu_serve.bench import journal_file
from tpu_serve.bench.journal_file import Contents, JournalFile
from tpu_serve.moe_plan.key import config_to_json
from tpu_serve.tuner.jobs import Job
from tpu_serve.tuner.trial import FAILED, REFUSED, WORKED, Task, Trial
from tpu_serve.tuning_tables.typed import to_json

NOTE = (
    "Scores are microseconds, lower is better. Of score_kind measured they are times on the device; schedule is modelled from the compiled "
    "schedule and bytes is calculated: these two were not measured."
)
CONTENTS = Contents("tpu-serve tune", NOTE, "--journal", "try")


class Journal(journal_file.Journal):
    """A `JournalFile` of tries. Use as a context manager.

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
        super().__init__(JournalFile(path, CONTENTS, self._take if resume else None))

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def _take(self, line: dict[str, Any]) -> None:
        what, trial = json.dumps(line["what"]), Trial(**line["trial"])
        if trial.outcome not in (WORKED, REFUSED, FAILED) or (trial.outcome == WORKED) != isinstance(
            trial.score, float
        ):
            raise ValueError("no trial")
        self._kept.pop(what, None)
        if trial.outcome != FAILED:
            self._kept[what] = trial

    def kept(self, what: dict[str, Any]) -> Trial | None:
        """What came of a try, by `what_of`, if it is there and need not be done again."""
        return self._kept.get(json.dumps(what))

    def add(self, what: dict[str, Any], trial: Trial) -> None:
        """Writes a try and waits until it is on the disk.

        Raises:
          ConfigError: it is not.
        """
        self._file.write({"what": what, "trial": asdict(trial)})


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
