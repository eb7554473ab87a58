"""The server's side of checker.py."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

PROGRAM = Path(__file__).with_name("checker.py")


class CheckTimeout(Exception):
    """The process had not answered in time and was ended."""


class CheckFailed(Exception):
    """The process ended instead of answering."""


class CheckProcess:
    """One process. Owned by one thread at a time; of no more use once a check has raised. Ended when it is forgotten."""

    def __init__(self, description: dict[str, object], program: Sequence[str] = ("-P", str(PROGRAM))):
        """Starts it, and waits for nothing. `description` is its first line."""
        self._process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is the server's business
        )
        self.close = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._unsent = json.dumps(description).encode() + b"\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self, grammar: str, *, translate: bool, seconds: float) -> dict[str, str]:
        """The answer: `grammar`, in Lark, or `error`.

        Raises:
          CheckTimeout: nothing after so many seconds.
          CheckFailed: the process is no more.
        """
        line = json.dumps({"grammar": grammar, "translate": translate}).encode() + b"\n"
        try:
            answer: dict[str, str] = json.loads(self._exchange(self._unsent + line, time.monotonic() + seconds))
        except (CheckTimeout, OSError, ValueError) as error:
            self.close()
            raise error if isinstance(error, CheckTimeout) else CheckFailed from error
        self._unsent = b""
        return answer

    def _exchange(self, data: bytes, deadline: float) -> bytes:
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._input, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise CheckTimeout
                for key, _ in ready:
                    if key.fd == self._output:
                        piece = os.read(self._output, 65536)
                        if not piece:
                            raise OSError("end of file")
                        answer += piece
                    else:
                        data = data[os.write(self._input, data[:65536]) :]
                        if not data:
                            selector.unregister(self._input)
        return bytes(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()
