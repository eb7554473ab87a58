"""A server in a process of its own: started, waited for, its memory watched, and stopped with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.2


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time; the message has its last words."""


def resident_bytes(pid: int) -> int:
    """Of a process and all its descendants; memory that they share counts for each."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * PAGE_BYTES
    return total


def end_when_terminated() -> None:
    """Makes SIGTERM end this process as an exception does, so that its servers are stopped."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class MemoryWatch:
    """Samples of `resident_bytes`, as (seconds since the start, bytes), taken in a thread until it is stopped."""

    def __init__(self, pid: int, seconds: float = SAMPLE_SECONDS):
        self.samples: list[tuple[float, int]] = []
        self._pid, self._seconds, self._ends = pid, seconds, threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.samples.append((time.monotonic() - self._started, resident_bytes(self._pid)))
            if self._ends.wait(self._seconds):
                return

    @property
    def peak_bytes(self) -> int:
        return max(size for _, size in self.samples)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()


class Server:
    """A running server.

    Attributes:
      url: without /v1.
      ready_seconds: from the start of its process until it answered a first request.
      memory: watched from the start on.
      exit_code: once it was stopped.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path):
        self.process, self.url, self.log = process, url, log
        self.ready_seconds = float("nan")
        self.memory = MemoryWatch(process.pid)
        self.exit_code: int | None = None

    def last_words(self) -> str:
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-6:])

    def stop(self, seconds: float = 60.0) -> None:
        """Asks it to end, and ends what is left of its process group after a while."""
        self.memory.stop()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.exit_code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the group is the server's own
        self.process.wait()


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    *,
    ready_body: bytes,
    ready_path: str = "/v1/completions",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> Iterator[Server]:
    """Starts a server and waits until it answers a POST of `ready_body`.

    Raises:
      ServerFailed: see there.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-serve-server-") as folder:
        log = Path(folder) / "log"
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        server = Server(process, f"http://127.0.0.1:{port}", log)
        try:
            _wait(server, ready_path, ready_body, started + timeout_s)
            server.ready_seconds = time.monotonic() - started
            yield server
        finally:
            server.stop()


def _wait(server: Server, path: str, body: bytes, deadline: float) -> None:
    request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
    answer = "no connection"
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerFailed(f"it ended with {server.process.returncode}: {server.last_words()}")
        try:
            with urllib.request.urlopen(request, timeout=max(1.0, deadline - time.monotonic())) as reply:
                reply.read()
                return
        except urllib.error.HTTPError as error:
            answer = f"{error.code} {error.read()[:300]!r}"
        except OSError:
            pass
        time.sleep(0.05)
    raise ServerFailed(f"it did not answer in time ({answer}): {server.last_words()}")
