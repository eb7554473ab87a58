"""The server as a process: its port, its log, its signals and its exit code."""

import contextlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import fake_build

from tpu_serve.config import EngineConfig, ServerConfig
from tpu_serve.server.logs import configure_logging
from tpu_serve.server.run import serve

FAKES = Path(__file__).parents[1] / "fakes.py"


class Process:
    """A running server."""

    def __init__(self, server: dict[str, Any], build: dict[str, Any], is_remote: bool):
        options = json.dumps({"port": 0, **server}), json.dumps(build), json.dumps(is_remote)
        command = [sys.executable, "-W", "error", str(FAKES), *options]
        self._popen = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def until(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        deadline = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)
        return result

    def until_line(self, pattern: str) -> re.Match[str]:
        return self.until(lambda: re.search(pattern, self.log))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def url(self) -> str:
        return self.until_line(r"listens on (http://\S+)")[1]

    def until_ready(self) -> str:
        self.until_line("Application startup complete")
        return self.url

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, seconds: float) -> int:
        """The exit code; the whole log is there afterwards."""
        code = self._popen.wait(seconds)
        self._reader.join(5)
        return code

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join(5)
        for pipe in (self._popen.stdout, self._popen.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def process(server: dict[str, Any] | None = None, *, is_remote: bool = True, **build: Any) -> Iterator[Process]:
    running = Process(server or {}, build, is_remote)
    try:
        yield running
    finally:
        running.close()


BOTH = pytest.mark.parametrize("is_remote", [True, False], ids=["its own process", "a thread"])
"""Where the engine runs."""


class Stream(threading.Thread):
    """A completion that streams in a thread; `text` is what has come."""

    def __init__(self, url: str, max_tokens: int):
        super().__init__()
        self._url, self._max_tokens = url, max_tokens
        self.text = ""
        self.start()

    def run(self) -> None:
        body = {"prompt": "hi", "max_tokens": self._max_tokens, "stream": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=30) as response,
        ):
            for piece in response.iter_text():
                self.text += piece


@BOTH
def test_a_whole_life(is_remote: bool):
    with process({"served_model_name": ["mine"]}, is_remote=is_remote, load_seconds=2, step_seconds=0.02) as server:
        url = server.url
        assert not url.endswith(":0")
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert health.json()["phase"] in ("import", "config", "tokenizer", "weights", "compile")
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "mine"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}).status_code == 503
        server.until_ready()
        loading = [line for line in server.lines if "/v1/" not in line]
        assert len(loading) <= 12
        assert all(line.startswith("INFO ") for line in loading)
        assert "non-default args: {'port': 0, 'served_model_name': ['mine']}" in loading[1]
        phases = ", ".join(rf"{phase} \d\.\d s" for phase in ("config", "tokenizer", "weights", "compile"))
        assert re.search(
            rf"Serving mine at {url} after \d+\.\d s \((import \d+\.\d s, )?{phases}\)\. Application startup complete\.$",
            server.lines[-1],
        )
        assert httpx.get(f"{url}/health").status_code == 200
        stream = Stream(url, 40)
        server.until(lambda: "data:" in stream.text)
        # a second connection, opened before, learns that the server is going away
        with httpx.Client() as client:
            assert client.get(f"{url}/health?deep=0").status_code == 200
            server.send(signal.SIGTERM)
            server.until_line("waiting up to 30 s for 1 requests")
            assert client.post(f"{url}/v1/completions", json={"prompt": "hi"}).status_code == 503
            assert client.get(f"{url}/health").json() == {"status": "draining"}
        assert server.wait(10) == 0
        stream.join(5)
        assert len("".join(re.findall(r'"text":"(.*?)"', stream.text))) == 40, "a letter a token"
        assert stream.text.endswith("data: [DONE]\n\n")
        assert server.lines[-1].endswith("Exiting: SIGTERM was received")
        assert '"GET /v1/models HTTP/1.1" 200' in server.log
        assert "/health" not in server.log
        assert "Traceback" not in server.log


def test_running_requests_are_aborted_when_the_wait_is_over():
    with process({"shutdown_timeout": 0.3}, step_seconds=0.05) as server:
        stream = Stream(server.until_ready(), 200)
        server.until(lambda: "data:" in stream.text)
        server.send(signal.SIGINT)
        assert server.wait(5) == 0
        stream.join(5)
        assert "server_shutting_down" in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        assert "Traceback" not in server.log


def test_a_second_signal_does_not_wait():
    with process({}, step_seconds=0.05) as server:
        stream = Stream(server.until_ready(), 200)
        server.until(lambda: "data:" in stream.text)
        server.send(signal.SIGINT)
        server.until_line("waiting up to 30 s")
        server.send(signal.SIGINT)
        assert server.wait(5) == 128 + signal.SIGINT
        stream.join(5)
        assert "server_shutting_down" in stream.text
        assert "Traceback" not in server.log


@BOTH
def test_a_signal_while_loading_ends_the_process_promptly(is_remote: bool):
    with process({}, is_remote=is_remote, load_seconds=60) as server:
        server.until_line("Loading: config took|loads")
        httpx.get(f"{server.url}/health")
        server.send(signal.SIGTERM)
        assert server.wait(5) == 0
        assert server.lines[-1].endswith("Exiting: SIGTERM was received")


@BOTH
def test_a_dying_engine_ends_the_process_and_says_why(is_remote: bool):
    with process({}, is_remote=is_remote, step_seconds=0.02, dies_after=20) as server:
        url = server.until_ready()
        stream = Stream(url, 200)
        server.until_line("The engine failed")
        started = time.monotonic()
        assert server.wait(5) == 1
        assert time.monotonic() - started < 5
        stream.join(5)
        assert '"reason":"engine_failed"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        assert server.lines[-1].startswith("ERROR")
        assert server.lines[-1].endswith("Exiting: the engine failed: RuntimeError")


@BOTH
def test_a_step_that_never_ends_does_not_keep_the_process(is_remote: bool):
    with process({"shutdown_timeout": 0.1}, is_remote=is_remote, step_seconds=1000) as server:
        url = server.until_ready()
        stream = Stream(url, 200)
        server.until(lambda: httpx.get(f"{url}/load").json()["server_load"])
        server.send(signal.SIGTERM)
        assert server.wait(8) == 0
        stream.join(5)
        assert server.lines[-1].endswith("Exiting: SIGTERM was received")


def test_a_unix_socket(tmp_path: Path):
    path = tmp_path / "server.sock"
    with process({"uds": str(path), "sse_keep_alive_interval": 0.05}, step_seconds=0.2) as server:
        server.until_line("Application startup complete")
        assert server.until_line(r"listens on (unix:\S+)")[1] == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://any") as client:
            body = {"prompt": "hi", "max_tokens": 3, "stream": True}
            text = client.post("/v1/completions", json=body).text
            assert text.count(": keep-alive\n\n") > 3
            assert text.endswith("data: [DONE]\n\n")
        server.send(signal.SIGTERM)
        assert server.wait(10) == 0
        assert not path.exists()


def test_the_server_listens_before_it_imports_jax():
    """Which takes seconds, and belongs to the engine's process."""
    program = "import sys, tpu_serve.server.run, tpu_serve.engine.process; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class Start:
    """Starts that fail, in this process."""

    def __init__(self, caplog: pytest.LogCaptureFixture):
        self._caplog = caplog

    def __call__(self, options: dict[str, Any], **build: Any) -> tuple[int, list[str]]:
        """The exit code, and the messages that are no plain information."""
        self._caplog.clear()
        config = ServerConfig(**{"port": 0, **options})
        code = serve(config, EngineConfig(), lambda config, on_phase: fake_build(on_phase, **build))
        return code, [record.getMessage() for record in self._caplog.records if record.levelname != "INFO"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Start:
    monkeypatch.setattr("tpu_serve.server.run.configure_logging", lambda level: None)
    return Start(caplog)


def test_a_configuration_that_cannot_work_is_one_message(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    assert start({}, error="config") == (2, ["--max-model-len 999 is larger than the model's limit of 256."])
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    code, messages = start({"chat_template": str(broken)})
    assert (code, len(messages)) == (2, 1)
    assert messages[0].startswith("The chat template is wrong at line 1")
    assert "Traceback" not in caplog.text


def test_a_crash_while_loading_has_a_traceback_and_says_why_last(start: Start, caplog: pytest.LogCaptureFixture):
    code, messages = start({}, error="crash")
    assert code == 1
    assert messages[-1] == "Exiting: loading failed: RuntimeError: the device is on fire"
    assert "Traceback" in caplog.text


def test_what_cannot_be_used_is_refused_before_anything_is_loaded(start: Start, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, message in (
            ({"port": port}, f"--port {port} is in use on 127.0.0.1; choose another one, or 0 for any free one."),
            ({"host": "203.0.113.1"}, "--host 203.0.113.1 is not an address of this machine."),
            ({"api_key_file": str(tmp_path)}, f"--api-key-file {tmp_path} cannot be read: Is a directory."),
            (
                {"ssl_certfile": "none"},
                "--ssl-certfile none with the key in none cannot be used: No such file or directory.",
            ),
            ({"chat_template": str(tmp_path / "none.jinja")}, f"--chat-template {tmp_path}/none.jinja is not a file."),
        ):
            assert start(options, load_seconds=60) == (2, [message])


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    root, access = logging.getLogger(), logging.getLogger("uvicorn.access")
    names = ("tpu_serve", "uvicorn.access", "uvicorn.error")
    before = root.handlers[:], root.level, access.filters[:], [logging.getLogger(name).level for name in names]
    yield
    root.handlers, access.filters = before[0], before[2]
    root.setLevel(before[1])
    for name, level in zip(names, before[3], strict=True):
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("_logging_restored")
def test_what_is_logged_at_each_level(capsys: pytest.CaptureFixture[str]):
    access, ours = logging.getLogger("uvicorn.access"), logging.getLogger("tpu_serve.server.x")
    for level, expected in (
        ("debug", ["ours debug", "ours info", "/v1/models", "/health?x=1", "/metrics", "their start", "ours error"]),
        ("info", ["ours info", "/v1/models", "ours error"]),
        ("warning", ["ours error"]),
    ):
        configure_logging(level)
        ours.debug("ours debug")
        ours.info("ours info")
        for path in ("/v1/models", "/health?x=1", "/metrics"):
            access.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", path, "1.1", 200)
        logging.getLogger("uvicorn.error").info("their start")
        logging.getLogger("somebody").info("else")
        ours.error("ours error")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(expected)
        assert all(text in line for text, line in zip(expected, lines, strict=True))
