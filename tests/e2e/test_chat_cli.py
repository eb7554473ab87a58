"""`tpu-serve chat` and `tpu-serve complete` against servers, good and bad."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from fakes import FakeRunner, live_server, saying

from tpu_serve.cli.main import main


class Typist(io.StringIO):
    """A terminal at which someone types these lines; an exception among them is raised instead."""

    def __init__(self, *lines):
        super().__init__()
        self._lines = iter(lines)

    def isatty(self):
        return True

    def readline(self, *_):
        line = next(self._lines, "")
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def ask(monkeypatch, capsys):
    """Runs a command with something on standard input; returns (exit code, standard output, standard error)."""
    for name in ("TPU_SERVE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def ask(*words, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        code = main(list(words))
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return ask


@pytest.fixture(scope="module")
def server():
    """A server that says hé, in pieces of characters, to everything."""
    with live_server(runner=FakeRunner(script=saying("hé 😀", "\nyou"))) as (url, runner):
        yield url, runner


def test_one_question(ask, server):
    url, _ = server
    assert ask("chat", "--url", url, "-q", "hello") == (0, "hé 😀\nyou\n", "")
    assert ask("complete", "--url", f"{url}/v1/", "--quick", "hello") == (0, "hé 😀\nyou\n", "")
    assert ask("chat", "--url", url.removeprefix("http://"), "--model-name", "tiny", "-q", "hello")[0] == 0


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_pipe_is_one_question(ask, server, command):
    assert ask(command, "--url", server[0], stdin="two\nlines\n") == (0, "hé 😀\nyou\n", "")
    assert ask(command, "--url", server[0], "-q", "-", stdin="x")[0] == 0
    assert "Standard input is empty" in ask(command, "--url", server[0])[2]


def test_an_answer_that_was_cut_is_said_to_be(ask, server):
    code, out, err = ask("complete", "--url", server[0], "-q", "x", "--max-tokens", "3")
    assert (code, out) == (0, "hé\n")
    assert "the text was cut" in err
    assert "--max-tokens" in ask("chat", "--url", server[0], "-q", "x", "--max-tokens", "3")[2]


def test_fields_without_effect_are_said_to_be(ask, server):
    code, _, err = ask("chat", "--url", server[0], "-q", "x", "--extra-body", '{"foo": 1, "bar": 2}')
    assert code == 0
    assert err == "tpu-serve: the server knows no fields foo, bar: they had no effect\n"
    assert "asks for n=2 answers" in ask("chat", "--url", server[0], "-q", "x", "--extra-body", '{"n": 2}')[2]


def test_a_refusal_is_one_sentence(ask, server):
    code, out, err = ask("chat", "--url", server[0], "-q", "x", "--model", "tiney")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("tpu-serve: error: The model `tiney` does not exist.")
    code, _, err = ask("complete", "--url", server[0], "-q", "x", "--temperature", "-1")
    assert code == 1
    assert "temperature" in err
    code, _, err = ask("complete", "--url", f"{server[0]}/elsewhere", "-q", "x")
    assert code == 1
    assert "/elsewhere/v1 right?" in err


def test_a_conversation(ask, server, monkeypatch):
    url, _ = server
    sent = []
    from tpu_serve.cli.remote import Remote

    real = Remote.stream
    monkeypatch.setattr(Remote, "stream", lambda self, path, body: sent.append(body) or real(self, path, body))
    typist = Typist("one\n", "\n", KeyboardInterrupt(), "two\n")
    code, out, err = ask("chat", "--url", url, "--system-prompt", "be kind", stdin=typist)
    assert code == 0
    assert out.count("hé 😀\nyou\n") == 2
    assert err == f"tpu-serve: tiny at {url}/v1; Ctrl-C ends an answer, Ctrl-D the program\n"
    assert [(one["role"], one["content"]) for one in sent[1]["messages"]] == [
        ("system", "be kind"), ("user", "one"), ("assistant", "hé 😀\nyou"), ("user", "two"),
    ]  # fmt: skip


def test_a_question_that_is_refused_is_no_part_of_the_conversation(ask, server):
    code, out, err = ask("chat", "--url", server[0], stdin=Typist("x" * 1000 + "\n", "two\n"))
    assert code == 0
    assert err.count("tpu-serve: error: ") == 1
    assert out.count("you\n") == 1


@contextlib.contextmanager
def answering(reply):
    """A server that sends these bytes to whoever asks, and keeps what it was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked = []

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += connection.recv(65536)
                    asked.append(data.decode())
                    models = b'{"data": [{"id": "m"}]}'
                    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(models)
                    connection.sendall(head + models if data.startswith(b"GET /v1/models") else reply)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields):
    return event(choices=[{"index": 0, "delta": fields}])


BAD = {
    "ended early": (STREAM + delta(content="par"), 1, "par\n", "closed the connection before the answer was complete"),
    "error in the stream": (
        STREAM + delta(content="par") + event(error={"message": "The engine\nfailed."}), 1, "par\n", "error: The engine failed.",
    ),
    "no JSON": (STREAM + b"data: {oops\n\n", 1, "", "does not answer as OpenAI's API does"),
    "no OpenAI": (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", 1, "", "404 Not Found. Is --url"),
    "FastAPI": (b'HTTP/1.1 422 X\r\n\r\n{"detail": "no such thing"}', 1, "", "error: no such thing"),
    "a key": (b'HTTP/1.1 401 X\r\n\r\n{"error": {"message": "Who are you?"}}', 1, "", "Who are you? (--api-key, or the environment"),
    "a text as error": (b'HTTP/1.1 500 X\r\n\r\n{"error": "sorry"}', 1, "", "error: sorry"),
    "moved": (b"HTTP/1.1 302 Found\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", 1, "", "answered 302 Found"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9\r\n", 2, "", "cannot be used: SSH-2.0-OpenSSH_9"),
    "nothing": (b"", 2, "", "cannot be used: Remote end closed connection without response"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_whatever_a_server_does_is_one_sentence(ask, name):
    reply, code, out, message = BAD[name]
    with answering(reply) as (url, _):
        result = ask("chat", "--url", url, "-q", "x")
    assert result[:2] == (code, out)
    assert message in result[2]
    assert result[2].count("\n") == 1


def test_reasoning_is_for_eyes_only(ask):
    reply = (
        STREAM
        + b": hi\n\n"
        + delta(role="assistant", content="")
        + delta(reasoning="let me")
        + delta(reasoning_content=" see")
    )
    reply += delta(content="\x1b[31mfour\n") + event(choices=[], usage={}) + b"data: [DONE]\n\n"
    with answering(reply) as (url, _):
        assert ask("chat", "--url", url, "-q", "2+2") == (0, "\x1b[31mfour\n", "")

        from tpu_serve.cli.ask import Printer

        class Terminal(io.StringIO):
            def isatty(self):
                return True

        screen = Terminal()
        printer = Printer(screen)
        for text, reasoning in (("", ""), ("", "let me"), ("", " see"), ("\x1b[31mfour\x9b\x07\n", "")):
            printer.reasoning(reasoning)
            printer.text(text)
        printer.close()
        assert screen.getvalue() == "\x1b[2mlet me see\n\x1b[0m[31mfour\n"


def test_the_key_is_sent(ask, monkeypatch):
    with answering(STREAM + b"data: [DONE]\n\n") as (url, asked):
        ask("chat", "--url", url, "-q", "x")
        assert "authorization" not in asked[-1].lower()
        monkeypatch.setenv("OPENAI_API_KEY", "second")
        ask("chat", "--url", url, "-q", "x")
        assert "Bearer second" in asked[-1]
        assert "Bearer second" in asked[-2], "for the list of models too"
        monkeypatch.setenv("TPU_SERVE_API_KEY", "first")
        ask("chat", "--url", url, "-q", "x")
        assert "Bearer first" in asked[-1]
        ask("chat", "--url", url, "-q", "x", "--api-key", "given")
        assert "Bearer given" in asked[-1]
        assert "characters that cannot be sent" in ask("chat", "--url", url, "-q", "x", "--api-key", "schlüssel")[2]
        assert "characters that cannot be sent" in ask("chat", "--url", url, "-q", "x", "--api-key", "a\r\nb: c")[2]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://here", "is not a URL like"),
        ("http://", "is not a URL like"),
        ("http://here:many", "is not a URL like"),
        ("http://here:99999", "is not a URL like"),
        ("http://127.0.0.1:1", "Nothing listens at http://127.0.0.1:1/v1"),
        ("127.0.0.1:1/v1", "Nothing listens at http://127.0.0.1:1/v1"),
        ("https://127.0.0.1:1", "Nothing listens at https://127.0.0.1:1/v1"),
        ("http://no-such-host.invalid", "There is no host 'no-such-host.invalid'"),
    ],
)
def test_a_server_that_is_not_there(ask, url, message):
    code, out, err = ask("chat", "--url", url, "-q", "x")
    assert (code, out) == (2, "")
    assert message in err


class Terminal:
    """A command at a real terminal."""

    def __init__(self, *words):
        self._fd, inner = pty.openpty()
        # The first terminal that the leader of a session opens is the one whose Ctrl-C it gets. Not by a fork: other tests here have threads.
        takes_terminal = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        command = [sys.executable, "-c", takes_terminal, "-m", "tpu_serve.cli.main", *words]
        self._process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
        os.close(inner)
        self.shown = ""

    def until(self, text, seconds=30):
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 0.1)[0]:
                self.shown += os.read(self._fd, 65536).decode("utf-8", "replace")

    def type(self, text):
        self.shown = ""
        os.write(self._fd, text.encode())

    def wait(self):
        with contextlib.suppress(OSError):
            while data := os.read(self._fd, 65536):
                self.shown += data.decode("utf-8", "replace")
        os.close(self._fd)
        return self._process.wait(timeout=30)


def test_keys_at_a_terminal():
    with live_server(runner=FakeRunner(seconds=0.01)) as (url, _):
        terminal = Terminal("complete", "--url", url, "--max-tokens", "200")
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("abc"[:1])
        terminal.type("\x03")
        terminal.until("> ")
        assert "Traceback" not in terminal.shown
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_an_interrupted_question_is_exit_code_130():
    with live_server(runner=FakeRunner(seconds=0.02)) as (url, runner):
        command = [
            sys.executable,
            "-m",
            "tpu_serve.cli.main",
            "complete",
            "--url",
            url,
            "-q",
            "hi",
            "--max-tokens",
            "200",
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
        assert (process.returncode, err) == (130, "tpu-serve: interrupted\n")
        assert out.endswith("\n"), "what came is kept, and the line ended"
        deadline = time.monotonic() + 5
        while runner.num_steps < 200 and time.monotonic() < deadline:
            before = runner.num_steps
            time.sleep(0.2)
            if runner.num_steps == before:
                break
        assert runner.num_steps < 150, "the server has stopped too"
