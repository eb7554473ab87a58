"""Rows that are there, compiled again: whether each still is legal and the TPU compiler still takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.moe_plan.key import problem_of_key
from tpu_serve.moe_plan.lookup import Row
from tpu_serve.tuner.parallel import in_parallel
from tpu_serve.tuner.trial import REFUSED, Executor, Task, Trial

Subject = tuple[Chip, Row]


def spread(subjects: Sequence[Subject], number: int | None) -> list[Subject]:
    """So many of them, evenly spaced; all where there are no more, or for None."""
    if number is None or number >= len(subjects):
        return list(subjects)
    return [subjects[index * len(subjects) // number] for index in range(number)]


def label(subject: Subject) -> str:
    chip, row = subject
    k = row.key
    return f"{chip.name} {k.format} {k.num_devices} devices, {k.num_tokens} tokens, {k.top_k} of {k.num_experts} experts {k.hidden}x{k.intermediate}"


def verify(
    subjects: Sequence[Subject], executor: Callable[[], Executor], num_jobs: int, stop: threading.Event
) -> Generator[tuple[Subject, Trial]]:
    """What came of each row as it is ready, `num_jobs` at a time."""

    def one(made: Executor, subject: Subject) -> tuple[Subject, Trial]:
        chip, row = subject
        problem = problem_of_key(row.key)
        if (reason := check(problem, row.value, chip)) is not None:
            return subject, Trial(REFUSED, reason)
        return subject, made.run(Task("", chip, problem, row.value))

    yield from in_parallel(subjects, executor, one, num_jobs, stop)
