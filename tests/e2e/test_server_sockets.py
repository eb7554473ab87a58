"""The server on real sockets: Unix sockets, TLS, and clients that speak badly or not at all."""

import contextlib
import json
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from fakes import FakeRunner, live_server

from tpu_serve.config import ConfigError, ServerConfig
from tpu_serve.server.listening import listening, tls_options

# Self-signed for localhost and 127.0.0.1 by `openssl req -x509 -newkey ec … -days 36500`; a secret of nothing.
CERTIFICATE, KEY = (
    str(Path(__file__).parents[1] / "fixtures" / "tls" / name) for name in ("certificate.pem", "key.pem")
)


def test_a_unix_socket_and_what_is_left_of_one(tmp_path: Path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))
    with live_server(ServerConfig(uds=str(path))) as (url, _):
        assert url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any") as client:
            answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3}).json()
            assert answer["usage"]["completion_tokens"] == 3
        assert stat.S_ISSOCK(path.stat().st_mode)
        with pytest.raises(ConfigError, match="in use by another server"), listening(ServerConfig(uds=str(path))):
            pass
    assert not path.exists()
    path.write_text("not a socket")
    with pytest.raises(ConfigError, match="exists and is no socket"), listening(ServerConfig(uds=str(path))):
        pass
    assert path.read_text() == "not a socket"


def test_https_with_and_without_certificates_of_clients():
    config = ServerConfig(port=0, ssl_certfile=CERTIFICATE, ssl_keyfile=KEY)
    trusting = ssl.create_default_context(cafile=CERTIFICATE)
    with live_server(config) as (url, _):
        assert url.startswith("https://127.0.0.1:")
        assert httpx.get(f"{url}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    config = ServerConfig(port=0, ssl_certfile=CERTIFICATE, ssl_keyfile=KEY, ssl_ca_certs=CERTIFICATE)
    with live_server(config) as (url, _):
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url}/health", verify=trusting)
        trusting.load_cert_chain(CERTIFICATE, KEY)
        assert httpx.get(f"{url}/health", verify=trusting).status_code == 200


def test_certificates_that_cannot_be_used_are_found_before_anything_is_loaded(tmp_path: Path):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for options in (
        {"ssl_certfile": str(wrong)},
        {"ssl_certfile": str(tmp_path / "none")},
        {"ssl_certfile": CERTIFICATE},
        {"ssl_certfile": CERTIFICATE, "ssl_keyfile": str(wrong)},
        {"ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY, "ssl_ca_certs": str(wrong)},
    ):
        with pytest.raises(ConfigError, match=r"^--ssl-.* cannot be used: "):
            tls_options(ServerConfig(**options))
    assert tls_options(ServerConfig()) == {}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpu_serve.server.connection.HEADER_SECONDS", 0.3)
        config = ServerConfig(port=0, h11_max_incomplete_event_size=2048, body_timeout=0.4, max_request_bytes=10_000)
        with live_server(config, runner=FakeRunner(seconds=0.001)) as (url, _):
            host, port = url.removeprefix("http://").split(":")
            yield host, int(port)


@contextlib.contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=5) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


@pytest.mark.parametrize("start", [b"", b"GET", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_clients_that_do_not_finish_their_headers_are_let_go(address: tuple[str, int], start: bytes):
    with connected(address) as connection:
        connection.sendall(start)
        started = time.monotonic()
        assert read_all(connection) == b""
        assert 0.1 < time.monotonic() - started < 3


def test_a_second_request_that_stalls_on_a_kept_connection_is_let_go(address: tuple[str, int]):
    with connected(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        time.sleep(0.6)  # idle is not stalling
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        started = time.monotonic()
        assert read_all(connection) == b""
        assert time.monotonic() - started < 3


def test_headers_may_come_in_pieces(address: tuple[str, int]):
    with connected(address) as connection:
        for byte in b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_",
    [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: " + b"a" * 5000, b"\x16\x03\x01\x02\x00"],
)
def test_what_is_not_http_is_refused_in_the_usual_form(address: tuple[str, int], request_: bytes):
    with connected(address) as connection:
        connection.sendall(request_)
        if not request_.startswith(b"\x16"):
            head, _, body = read_all(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert json.loads(body)["error"]["reason"] == "invalid_http"
        else:
            read_all(connection)


def test_a_body_that_stalls_is_answered(address: tuple[str, int]):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with connected(address) as connection:
        connection.sendall(head + b'content-length: 100\r\n\r\n{"pro')
        text = read_all(connection)
        assert text.startswith(b"HTTP/1.1 408")
        assert b'"reason":"body_timeout"' in text
    with connected(address) as connection:
        connection.sendall(head + b"content-length: 100000\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_head_on_the_wire(address: tuple[str, int]):
    with connected(address) as connection:
        connection.sendall(
            b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        first, second = read_all(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert b"content-length: " in first
        assert first.endswith(b"\r\n\r\n")
        assert b'"version"' in second


def test_clients_come_back_when_they_are_told_to():
    """The client's own retries, twice by default, with the pause that the server asks for."""
    with live_server(max_num_queued=1, runner=FakeRunner(seconds=0.002)) as (url, runner):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client, pytest.MonkeyPatch.context() as patch:
            pauses: list[float] = []
            clock = SimpleNamespace(**{**vars(time), "sleep": pauses.append})
            patch.setattr("openai._base_client.time", clock)
            runner.hangs.set()
            body = {"prompt": "hi", "max_tokens": 200, "stream": True}
            with contextlib.ExitStack() as stack:
                http = stack.enter_context(httpx.Client(base_url=url))
                stack.enter_context(http.stream("POST", "/v1/completions", json=body))
                while not runner.num_steps:  # it runs, and its step never ends
                    time.sleep(0.005)
                stack.enter_context(http.stream("POST", "/v1/completions", json=body))  # it waits
                with pytest.raises(openai.InternalServerError) as refused:
                    client.completions.create(model="tiny", prompt="x")
                runner.hangs.clear()
            assert refused.value.status_code == 503
            assert refused.value.body["reason"] == "queue_full"
            waits = float(refused.value.response.headers["retry-after-ms"]) / 1000
            assert len(pauses) == 2
            assert pauses == [pytest.approx(waits, abs=0.6)] * 2
