"""A batch's input from a URL."""

import contextlib
import http.server
import threading

import pytest

from tpu_serve.cli.batch_download import download
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError

DATA = b'{"custom_id": 1}\n' * 1000


@contextlib.contextmanager
def serving():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path != "/missing" else 404)
            length = len(DATA) + 5 * (self.path == "/cut")
            self.send_header("content-length", str(length))
            self.end_headers()
            self.wfile.write(DATA)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_whole_file():
    with serving() as url, download(f"{url}/in.jsonl") as file:
        assert file.read() == DATA
        assert file.seekable()


@pytest.mark.parametrize(("path", "message"), [("missing", "answered 404"), ("cut", "5 more expected")])
def test_what_cannot_be_read(path, message):
    with serving() as url, pytest.raises(ConfigError, match=message):
        download(f"{url}/{path}")


def test_nobody_there(tmp_path, capsys):
    assert main(["batch", "-i", "http://127.0.0.1:1/in.jsonl", "-o", str(tmp_path / "out")]) == 2
    assert "http://127.0.0.1:1/in.jsonl cannot be read: " in capsys.readouterr().err


def test_results_are_not_sent_anywhere(tmp_path, capsys):
    (tmp_path / "in").write_text("")
    assert main(["batch", "-i", str(tmp_path / "in"), "-o", "https://example.invalid/out"]) == 2
    assert "is a URL, and results are appended as they come" in capsys.readouterr().err
