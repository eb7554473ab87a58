"""What operators ask of the process that holds an engine. It is not a matter of steps, so it waits for none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tpu_serve.engine.engine import Engine
    from tpu_serve.engine.profiler import Profiler

Operation = Literal["describe", "start_profile", "stop_profile"]


class OperationFailed(RuntimeError):
    """The engine's process could not do what it was asked; its log says why."""


class Operations:
    """Of one engine. Any thread may call them."""

    def __init__(self) -> None:
        self._profiler: Profiler | None = None

    def begin(self, engine: Engine, name: Operation, *arguments: Any) -> Future[Any]:
        """Does it in a thread of its own. See the methods for arguments, results and errors."""
        done: Future[Any] = Future()
        functions: dict[str, Callable[..., Any]] = {
            "describe": self._describe,
            "start_profile": self._start,
            "stop_profile": self._stop,
        }

        def work() -> None:
            try:
                done.set_result(functions[name](engine, *arguments))
            except Exception as error:
                done.set_exception(error)

        threading.Thread(target=work, name=name, daemon=True).start()
        return done

    def _describe(self, engine: Engine) -> dict[str, Any]:
        """The devices and sizes of an engine, see description.py."""
        from tpu_serve.engine.description import describe_devices, describe_engine  # imports jax, as the build has done

        return {"devices": describe_devices(engine), "engine": describe_engine(engine)}

    def _start(self, engine: Engine, folder: str) -> bool:
        """See `Profiler.start`; the folder is that of the first call."""
        from tpu_serve.engine.profiler import Profiler

        if self._profiler is None:
            self._profiler = Profiler(folder)
        return self._profiler.start()

    def _stop(self, engine: Engine) -> bool:
        return self._profiler is not None and self._profiler.stop()
