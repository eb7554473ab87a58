"""What is done about programs that are compiled after an engine's start, when there should be none left to compile."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tpu_serve.runner.compile_counter import num_unexpected, watch

logger = logging.getLogger(__name__)


class Recompiled(RuntimeError):
    """A program was compiled after the start, and --on-recompile error forbids that."""


class Recompiles:
    """Follows what this process compiles from now on, whoever asks for it, until it is collected as garbage.

    Args:
      policy: of --on-recompile.
      fail: ends the engine with an error; any thread may call it.
    """

    def __init__(self, policy: str, fail: Callable[[Exception], None]):
        self._policy, self._fail = policy, fail
        self._before = num_unexpected()
        self._names: set[str] = set()
        self._watcher = watch(self._tell)

    @property
    def num(self) -> int:
        """Programs so far; the starts of other engines in this process do not count."""
        return num_unexpected() - self._before

    def _tell(self, name: str) -> None:
        if self._policy == "error":
            self._fail(Recompiled(f"{name} was compiled after the start (--on-recompile error)"))
        elif self._policy == "warn" and name not in self._names:
            self._names.add(name)
            logger.warning(
                "%s was compiled after the start: the engine or a program beside it in this process has waited for that (--on-recompile)",
                name,
            )
