"""Many things tried at a time, each thread with an executor of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from tpu_serve.tuner.trial import Executor

S = TypeVar("S")
R = TypeVar("R")


def in_parallel(
    subjects: Sequence[S],
    executor: Callable[[], Executor],
    work: Callable[[Executor, S], R],
    num_jobs: int,
    stop: threading.Event,
) -> Generator[R]:
    """What `work` returns for each subject as it is ready, `num_jobs` at a time. All end when the caller wants no more.

    Args:
      executor: makes one, which raises `Stopped` when `stop` is set.
    """
    executors: list[Executor] = []
    local = threading.local()

    def one(subject: S) -> R:
        if not hasattr(local, "executor"):
            local.executor = executor()
            executors.append(local.executor)
        return work(local.executor, subject)

    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            for future in as_completed([pool.submit(one, subject) for subject in subjects]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for made in executors:
                made.close()
