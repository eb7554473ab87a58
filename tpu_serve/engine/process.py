"""The process of an engine, as the one that starts it sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.engine.channel import Frames, closed, frame, messages_of
from tpu_serve.engine.messages import Build, Phase, Ready, Refused, Start, decode_from_engine
from tpu_serve.engine.remote import RemoteEngine

logger = logging.getLogger(__name__)

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tpu_serve.engine.worker import main; main(int(sys.argv[2]))"
_GRACE = 1.0
"""Seconds in which a process that has closed its end of the connection is gone."""


class LoadingFailed(RuntimeError):
    """The engine's process could not make the engine. Its log has the traceback if there is one."""


class EngineProcess:
    """Starts one process, and ends it. It ends by itself when this one does.

    Args:
      prepare: is called in it before anything else. It is pickled.
      build: makes the engine in it; `build_engine` when left out. It is pickled.
    """

    def __init__(self, prepare: Callable[[], None] | None = None, build: Build | None = None):
        self._prepare, self._build = prepare, build
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        """None before it is started."""
        return None if self._process is None else self._process.pid

    def build(
        self, config: EngineConfig, on_phase: Callable[[str, float], None] = lambda name, share: None
    ) -> RemoteEngine:
        """The engine, once it is ready. Blocks meanwhile; `kill` in another thread ends that.

        Raises:
          ConfigError: as `build_engine`.
          LoadingFailed: anything else went wrong, or the process has ended.
        """
        ours, frames = self._start(), Frames()
        try:
            with contextlib.suppress(OSError):  # it has ended already, which is seen below
                ours.sendall(frame(pickle.dumps(Start(config, self._prepare, self._build))))
            for data in messages_of(ours, frames):
                match decode_from_engine(data):
                    case Phase(name, share):
                        on_phase(name, share)
                    case Refused(why, is_config):
                        raise ConfigError(why) if is_config else LoadingFailed(why)
                    case Ready() as ready:
                        return RemoteEngine(self, ours, frames, ready)
            raise LoadingFailed(self.last_words())
        except BaseException:
            closed(ours)
            self.end(_GRACE)
            raise

    def last_words(self) -> str:
        """Why the process has ended, when its end of the connection is closed. One that goes on all the same is killed."""
        code = self.end(_GRACE)
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"the engine's process was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"

    def end(self, seconds: float) -> int:
        """Waits for the process, and kills it after so many seconds. Returns its exit code, minus the signal that killed it."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            logger.warning("The engine's process goes on after %g seconds: it is killed", seconds)
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Ends the process now, if it was started and still is, and lets it never start otherwise. Any thread may call it."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *(f"-W{option}" for option in sys.warnoptions),
                    "-c",
                    _PROGRAM,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is this process's business
            )
        if self._is_killed:
            self.kill()
        return ours
