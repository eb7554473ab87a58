"""A process that answers requests, one at a time, and may hang or die without harm to this one."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from tpu_serve.config import ConfigError
from tpu_serve.tuner.trial import Stopped

_POLL_SECONDS = 0.2


class WorkerFailed(Exception):
    """No answer to one request; the message says why in a line. The next one will start a new process where that is needed."""


class Worker:
    """A process of `worker.py`, started when it is first asked, and again after it has hung or died.

    Args:
      handler: "module:function"; the function is called once in the new process with `arguments` and returns a function of a request that
        returns an answer. It is searched where this process searches.
      environment: of the process, beside this one's.
      stop: when it is set, `ask` raises `Stopped`.
      start_timeout_s: until the handler must be there.
    """

    def __init__(
        self, handler: str, arguments: Mapping[str, Any], environment: Mapping[str, str],
        stop: threading.Event | None = None, start_timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        self._command = [sys.executable, "-m", "tpu_serve.tuner.worker", handler, json.dumps(dict(arguments))]
        search = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._environment = {**os.environ, **environment, "PYTHONPATH": search}
        self._stop, self._start_timeout_s = stop or threading.Event(), start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._read = b""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to a request.

        Raises:
          WorkerFailed: the handler raised, the time is over, or the process ended.
          ConfigError: no process can be started.
          Stopped: see the class.
        """
        process = self._process or self._start()
        answer = self._exchange(process, request, timeout_s)
        if "raised" in answer:
            raise WorkerFailed(str(answer["raised"]))
        return answer

    def close(self) -> None:
        """Ends the process at once."""
        process, self._process, self._read = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what could not be written before
                    assert pipe is not None
                    pipe.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            bufsize=0, start_new_session=True,  # an interrupt from the keyboard is this process's business
        )  # fmt: skip
        try:
            answer = self._exchange(self._process, None, self._start_timeout_s)
        except WorkerFailed as error:
            raise ConfigError(f"the process that tries configs cannot start: {error}") from None
        if "raised" in answer:
            self.close()
            raise ConfigError(f"the process that tries configs cannot start: {answer['raised']}")
        return self._process

    def _exchange(
        self, process: subprocess.Popen[bytes], request: Mapping[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        """Sends a request, None for none, and waits for the next answer. The process has ended when this raises."""
        assert process.stdin is not None
        try:
            if request is not None:
                self._forget_words()
                process.stdin.write(json.dumps(dict(request)).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._line(process, timeout_s))
        except (EOFError, BrokenPipeError):
            process.wait()
            words = self._last_words()
            self.close()
            raise WorkerFailed(f"the process ended with {process.returncode}{f': {words}' if words else ''}") from None
        except BaseException:
            self.close()
            raise
        return answer

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        assert process.stdout is not None
        end = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if self._stop.is_set():
                    raise Stopped
                if time.monotonic() >= end:
                    raise WorkerFailed(f"no answer after {timeout_s:g} s")
                if ready.select(_POLL_SECONDS):
                    found = os.read(process.stdout.fileno(), 1 << 16)
                    if not found:
                        raise EOFError
                    self._read += found
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _forget_words(self) -> None:
        """What was printed for earlier requests. The process writes on from where this leaves the file, which both have open."""
        if self._errors is not None:
            self._errors.seek(0)
            self._errors.truncate()

    def _last_words(self, limit: int = 400) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read()[-8192:].decode(errors="replace").split("\n")
        return " ".join(" ".join(lines[-6:]).split())[-limit:]
