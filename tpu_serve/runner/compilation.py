"""Compiles programs in threads of its own, so that a start can do other things meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tpu_serve.runner import background
from tpu_serve.runner.compile_counter import expected

MOST_THREADS, FEWEST_THREADS = 16, 4
"""XLA spends part of a compilation in one thread, so a few at a time keep even two cores busy. Each takes memory of the host."""


@dataclass(frozen=True, slots=True)
class Program:
    """Something to compile.

    Attributes:
      name: unique among those of an engine.
      lower: traces it; everything it needs are shapes.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]


@dataclass(frozen=True, slots=True)
class Made:
    """A program that is there.

    Attributes:
      compiled: None where only what is known of it was wanted.
      is_kept: it was kept from an earlier start, other than by JAX's own cache.
      memory: stands for its own account of its memory.
    """

    compiled: Any
    is_kept: bool = False
    memory: Any = None

    def memory_analysis(self) -> Any:
        """What it takes of each device's memory in bytes, a `CompiledMemoryStats` or the like; None where nobody can tell."""
        return self.compiled.memory_analysis() if self.memory is None and self.compiled is not None else self.memory


Compile = Callable[[Program], Made]


def compile_now(program: Program) -> Made:
    """Compiles, or takes from the cache that JAX keeps."""
    return Made(program.lower().compile())


class Cancelled(RuntimeError):
    """Nobody wants the programs any more."""


class Compilation:
    """Programs under way.

    Args:
      programs: in the order in which they are begun.
      compile: makes one of them, in one of several threads.
      made: those that are there already, by name.

    Attributes:
      names: of all programs, in that order.
      seconds: that each took, of those that are done.
      on_change: called in some thread whenever a program is done or the first one has failed.
    """

    def __init__(
        self, programs: Sequence[Program], compile: Compile = compile_now, made: Mapping[str, Made] | None = None
    ):
        self.names = tuple(program.name for program in programs)
        self.seconds: dict[str, float] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._done: dict[str, Made] = dict(made or {})
        self._compile = compile
        self._waiting = deque(program for program in programs if program.name not in self._done)
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        num_threads = min(len(self._waiting), MOST_THREADS, max(FEWEST_THREADS, os.cpu_count() or 1))
        for number in range(num_threads):
            background.start(self._work, f"compile-{number}")

    @property
    def num_done(self) -> int:
        return len(self._done)

    @property
    def failure(self) -> BaseException | None:
        """Why a program could not be compiled. The others are given up then."""
        return self._failure

    def is_done(self, name: str) -> bool:
        return name in self._done

    def __getitem__(self, name: str) -> Any:
        """A program, waited for: a `jax.stages.Compiled`.

        Raises:
          BaseException: what kept it, or another program before it, from being compiled.
        """
        return self.made(name).compiled

    def made(self, name: str) -> Made:
        """A program, waited for, and what is known of it.

        Raises:
          BaseException: as for `[name]`.
        """
        self.wait([name])
        return self._done[name]

    def wait(self, names: Collection[str], on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Waits for some programs.

        Args:
          on_progress: told how many of how many are done, in the caller's thread.

        Raises:
          BaseException: as for a single one.
        """
        told = -1
        while True:
            with self._changed:
                num_done = sum(name in self._done for name in names)
                if num_done == told and self._failure is None:
                    self._changed.wait()
                    continue
                failure = self._failure
            if num_done > max(told, 0):
                on_progress(num_done, len(names))
            told = num_done
            if num_done == len(names):
                return
            if failure is not None:
                raise failure

    def cancel(self) -> None:
        """Begins no further program. Those under way go on, and nobody can wait for anything any more."""
        self._fail(Cancelled("the programs are not wanted any more"))

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    return
                program = self._waiting.popleft()
            started = time.perf_counter()
            try:
                with expected():
                    made = self._compile(program)
            except BaseException as error:
                self._fail(error)
                return
            with self._changed:
                self._done[program.name] = made
                self.seconds[program.name] = time.perf_counter() - started
                self._changed.notify_all()
            self.on_change()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._waiting.clear()
            if self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
        self.on_change()
