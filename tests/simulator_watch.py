"""Watches a simulated kernel: who waits for what, what is left behind, and whether anybody can still go on."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Deadlock(Exception):
    """Nobody can go on, or nothing has happened for too long."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """A core that is inside a wait."""

    semaphore: Any
    core: int
    value: int
    needed: int  # of all that was ever signalled, for this wait to end
    place: Callable[[], str]  # looked up only when somebody asks

    def is_hopeless(self) -> bool:
        """Whether only another core can end this wait.

        The semaphore's count does not say so: a wait that has taken its share and has not returned yet has left zero behind.
        """
        with self.semaphore.cv:
            return self.semaphore.signalled[self.core] < self.needed and not self.semaphore.unfinished[self.core]

    def __str__(self) -> str:
        count = self.semaphore.count_by_core[self.core]
        name = self.semaphore.name()
        return f"device {self.core} waits at {self.place()} until {name}, now {count}, is {self.value}"


class Watch:
    """What is known of one run, and the thread that ends it when nobody can go on.

    Args:
        timeout_seconds: how long nothing may happen.
        shared_memory: the interpreter's state of the kernel that runs, or None.
    """

    POLL_SECONDS = 0.05
    GRACE_SECONDS = 5.0  # for the devices to meet after a deadlock was declared

    def __init__(self, timeout_seconds: float, shared_memory: Callable[[], Any]) -> None:
        self.timeout_seconds = timeout_seconds
        self._shared_memory = shared_memory
        self.mode = ""
        self.progress = 0
        self.waits: dict[int, Wait] = {}
        self.races: list[str] = []
        self.leftovers: list[str] = []
        self.failure: BaseException | None = None
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self, mode: str) -> Iterator[None]:
        self.mode, self.races, self.leftovers, self.failure = mode, [], [], None
        self._stop.clear()
        thread = threading.Thread(target=self._guard, name="simulator watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def note_race(self, description: str) -> None:
        self.races.append(description)

    def all_finished(self, shared: Any) -> None:
        """Every device is through (or has raised): note what the kernel left behind."""
        self.failure = self.failure or shared._failure
        self.leftovers += _pending(shared)

    def _guard(self) -> None:
        seen, since, declared = -1, time.monotonic(), None
        while not self._stop.wait(self.POLL_SECONDS):
            shared, now = self._shared_memory(), time.monotonic()
            if shared is None or self.progress != seen:
                seen, since = self.progress, now
            if shared is None:
                continue
            if shared._failure is not None:
                self.failure = self.failure or shared._failure
                declared = declared or now
                if now - declared > self.GRACE_SECONDS:
                    shared.clean_up_barrier.abort()  # a device that never enters would hold up the others for ever
            elif self._nobody_can_go_on(shared):
                self._declare(shared, "everybody waits")
            elif now - since > self.timeout_seconds:
                self._declare(shared, f"nothing happened for {self.timeout_seconds} s")

    def _nobody_can_go_on(self, shared: Any) -> bool:
        before = self.progress
        if shared.num_cores != shared.num_devices:
            return False
        hopeless = sum(wait.is_hopeless() for wait in list(self.waits.values()))
        at_barrier = shared.barrier.n_waiting + shared.clean_up_barrier.n_waiting
        return hopeless > 0 and hopeless + at_barrier == shared.num_devices and self.progress == before

    def _declare(self, shared: Any, reason: str) -> None:
        lines = [reason, *sorted(map(str, list(self.waits.values())))]
        for name, barrier in (("entry", shared.barrier), ("exit", shared.clean_up_barrier)):
            if barrier.n_waiting:
                lines.append(f"{barrier.n_waiting} of {shared.num_devices} devices are at the {name} of the kernel")
        lines += _pending(shared)
        with shared.lock:
            if shared._failure is None:
                shared._failure = Deadlock("\n  ".join(lines))
        shared.barrier.abort()


def _pending(shared: Any) -> list[str]:
    """Semaphores that are not zero and copies that have not moved."""
    lines = []
    for semaphore in [*shared.sem.values(), *shared.fixed_id_sem.values()]:
        for core in range(shared.num_cores):
            with semaphore.cv:
                count, tasks = semaphore.count_by_core[core], list(semaphore.tasks[core])
            if count:
                lines.append(f"{semaphore.name()} of device {core} is {count}")
            for task in tasks:
                if not task.has_moved():
                    lines.append(f"device {core} has not waited for the copy started at {task.place()}")
    return lines
