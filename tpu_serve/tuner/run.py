"""A job from its first config to its row, and many jobs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from tpu_serve.config import ConfigError
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.legality import supports
from tpu_serve.tuner.jobs import Job
from tpu_serve.tuner.journal import Journal, what_of
from tpu_serve.tuner.parallel import in_parallel
from tpu_serve.tuner.rows import Row, compiled_row, measured_row
from tpu_serve.tuner.search import MARGIN, Search
from tpu_serve.tuner.trial import BYTES, FAILED, MEASURED, SCHEDULE, WORKED, Executor, Stopped, Task, Trial

TUNED, REFUSED_JOB, FAILED_JOB = "tuned", "refused", "failed"

MOST_DRIFT = 0.03
"""By so much the control, the heuristic's config, may take longer or less long at the end of a job than at its beginning."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job.

    Attributes:
      outcome: "tuned", "refused" (the kernel cannot run it at all) or "failed" (no config that was tried works).
      reason: of the latter two.
      trials: the configs in the order in which they were tried, the heuristic's first.
      chosen: one of them.
      num_pruned: legal configs that were calculated to be too slow to be tried.
      row: for the table.
      drift: of the control, relative; 0 where nothing is measured.
      xla: XLA's program, where it was measured.
    """

    job: Job
    outcome: str
    reason: str = ""
    trials: tuple[tuple[Config, Trial], ...] = ()
    chosen: Config | None = None
    num_pruned: int = 0
    row: Row | None = None
    drift: float = 0.0
    xla: Trial | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes:
    num_candidates: configs that are tried for a job at most.
    date: today's, YYYY-MM-DD.
    jax, libtpu: versions.
    """

    num_candidates: int
    date: str
    jax: str
    libtpu: str


class Tuner:
    """Tunes one job after the other with one executor.

    Args:
      journal: None keeps none.
    """

    def __init__(self, executor: Executor, settings: Settings, journal: Journal | None = None):
        self._executor, self._settings, self._journal = executor, settings, journal

    def tune(self, job: Job) -> Result:
        """Raises:
        Stopped: see `Executor.run`.
        ConfigError: the journal cannot be written, or the executor cannot run at all.
        """
        reason = supports(job.problem, job.chip)
        if reason is None:
            try:
                Search(job.problem, job.chip, 1)
            except ValueError as error:
                reason = str(error)
        if reason is not None:
            return Result(job, REFUSED_JOB, reason)
        # A control that moved says that something else did, and that the order of configs decided. It may have been for a while only.
        result = self._attempt(job, 1) or self._attempt(job, 2)
        assert result is not None
        return result

    def _attempt(self, job: Job, attempt: int) -> Result | None:
        """None where the control moved and the job is to be repeated."""
        search = Search(job.problem, job.chip, self._settings.num_candidates)
        trials: list[tuple[Config, Trial]] = []
        kind = ""
        while (config := search.ask()) is not None:
            trial = self._try(job, config, "candidate", attempt)
            trials.append((config, trial))
            # Scores are comparable within a kind only. The first that works decides, which is the heuristic's config if it can.
            kind = kind or trial.score_kind
            search.tell(config, trial.score if trial.score_kind == kind else None)
        first, drift = trials[0][1], 0.0
        if self._executor.kind == MEASURED and first.score is not None:
            control = self._try(job, search.first, "control", attempt)
            drift = 1.0 if control.score is None else abs(control.score / first.score - 1)
        if attempt == 1 and drift > MOST_DRIFT:
            return None
        chosen = search.chosen(max(MARGIN, drift))
        if chosen is None:
            alone = f"none of {len(trials)} configs works; the heuristic's: " if len(trials) > 1 else ""
            return Result(job, FAILED_JOB, alone + first.reason, tuple(trials), num_pruned=len(search.pruned))
        xla = self._try(job, None, "xla", attempt) if self._executor.kind == MEASURED else None
        row = self._row(job, chosen, dict(trials)[chosen], xla, drift)
        return Result(job, TUNED, "", tuple(trials), chosen, len(search.pruned), row, drift, xla)

    def _try(self, job: Job, config: Config | None, role: str, attempt: int) -> Trial:
        task = Task(job.workload, job.chip, job.problem, config)
        what = what_of(job, task, self._executor.kind, self._executor.routing, role, attempt)
        if self._journal is not None and (kept := self._journal.kept(what)) is not None:
            return kept
        try:
            trial = self._executor.run(task)
        except (Stopped, ConfigError):
            raise
        except Exception as error:  # of this config alone, whatever it is
            trial = Trial(FAILED, " ".join(f"{type(error).__name__}: {error}".split()))
        if self._journal is not None:
            self._journal.add(what, trial)
        return trial

    def _row(self, job: Job, config: Config, trial: Trial, xla: Trial | None, drift: float) -> Row:
        found = self._settings.date, self._settings.jax, self._settings.libtpu
        if trial.score_kind == MEASURED:
            beside = xla if xla is not None and xla.outcome == WORKED else None
            return measured_row(job.key, config, trial, beside, self._executor.routing, *found, drift)
        assert trial.score_kind in (BYTES, SCHEDULE)
        return compiled_row(job.key, config, trial, self._executor.routing, *found)


def tune_all(
    jobs: Sequence[Job],
    executor: Callable[[], Executor],
    settings: Settings,
    journal: Journal | None,
    num_jobs: int,
    stop: threading.Event,
) -> Generator[Result]:
    """Results as they are ready, `num_jobs` at a time, each with an executor of its own. All end when the caller wants no more.

    Args:
      executor: makes one, which raises `Stopped` when `stop` is set.
    """
    yield from in_parallel(jobs, executor, lambda made, job: Tuner(made, settings, journal).tune(job), num_jobs, stop)
