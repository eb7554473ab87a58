"""`tpu-serve bench serve` against the fake engine's server, and against servers that behave badly."""

import contextlib
import json
import socket
import threading
import time

import jax
import pytest
from fakes import FakeRunner, live_server

from tpu_serve import __version__
from tpu_serve.cli.main import main
from tpu_serve.config import EMBEDDED_MODEL

TOKENIZER = ["--tokenizer", str(EMBEDDED_MODEL)]
SMALL = ["--random-input-len", "12", "--random-output-len", "6", "--disable-tqdm"]


@pytest.fixture(scope="module")
def server():
    """A server whose answers are letters for ever."""
    with live_server(runner=FakeRunner(seconds=0.002)) as (url, _):
        yield url


@pytest.fixture
def bench(capsys, monkeypatch, tmp_path):
    """Runs `bench serve`; returns (exit code, the printed block by label, standard error, the file)."""
    for name in ("TPU_SERVE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def bench(url, *words, saves=True):
        path = tmp_path / "result.json"
        saving = ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
        code = main(["bench", "serve", "--base-url", url, *TOKENIZER, *words, *(saving if saves else [])])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        lines = dict(line.rsplit(None, 1) for line in shown.out.splitlines() if ": " in line)
        return code, lines, shown.err, json.loads(path.read_text()) if saves and path.exists() else None

    return bench


KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    "input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors",
}  # fmt: skip


def test_a_run(bench, server):
    code, lines, err, found = bench(
        server, *SMALL, "--seed", "7", "--num-prompts", "9", "--num-warmups", "9", "--max-concurrency", "3", "--metric-percentiles", "50,99",
        "--goodput", "e2el:60000", "--label", "first", "--metadata", "chip=none", "who=me",
    )  # fmt: skip
    assert code == 0, err
    assert lines["Successful requests:"] == "9"
    assert lines["Failed requests:"] == "0"
    assert lines["Maximum request concurrency:"] == "3"
    assert lines["Total generated tokens:"] == "54"
    assert lines["Peak concurrent requests:"] == "3.00"
    assert lines["Request goodput (req/s):"] == lines["Request throughput (req/s):"]
    assert float(lines["P99 E2EL (ms):"]) >= float(lines["Median E2EL (ms):"]) > 0
    assert KEYS - found.keys() == set()
    assert found["client_versions"]["tpu_serve"] == found["versions"]["tpu_serve"] == __version__
    assert found["versions"]["jax"] == jax.__version__, "as /server_info of the server says"
    assert (found["model_id"], found["request_rate"], found["label"], found["chip"]) == ("tiny", "inf", "first", "none")
    assert found["output_lens"] == [6] * 9
    assert all(len(gaps) <= 5 for gaps in found["itls"]), "tokens that wait for a slow client come together"
    assert found["tokens_per_chunk"] == pytest.approx(54 / sum(len(gaps) + 1 for gaps in found["itls"]))
    assert found["total_input_tokens"] == sum(found["input_lens"])
    assert found["errors"] == [""] * 9
    assert all(len(text) == 6 for text in found["generated_texts"])
    # The server counts exactly the run, without the warm-up and the first request that asked whether it is ready.
    assert found["server"]["generated_tokens"] == 54
    assert found["server"]["num_compiled"] == 0
    assert found["server"]["kv_hit_rate"] < 0.1, "the warm-up has prompts of its own"
    assert 0 < found["server"]["mean_ttft_ms"] <= found["mean_ttft_ms"]
    assert float(lines["Server mean TTFT (ms):"]) == pytest.approx(found["server"]["mean_ttft_ms"], abs=0.01)


def test_chat_at_a_rate_repeated(bench, server):
    code, lines, err, found = bench(
        server, *SMALL, "--backend", "openai-chat", "--num-prompts", "6", "--request-rate", "60", "--repeat", "2"
    )
    assert code == 0, err
    assert lines["Request rate configured (RPS):"] == "60.00"
    assert [run["completed"] for run in found["repeats"]] == [6, 6]
    low, high = (pick(run["mean_ttft_ms"] for run in found["repeats"]) for pick in (min, max))
    assert found["spread"]["mean_ttft_ms"]["min"] == low
    assert low <= found["mean_ttft_ms"] <= high
    assert found["duration"] >= 6 / 60


def test_without_a_stream(bench, server):
    code, lines, _, found = bench(server, *SMALL, "--num-prompts", "2", "--no-stream")
    assert code == 0
    assert "Mean TTFT (ms):" not in lines
    assert found["total_output_tokens"] == 12
    assert found["mean_e2el_ms"] > 0


def test_results_are_appended_and_compared(server, tmp_path, capsys):
    for _ in range(2):
        assert main(["bench", "serve", "--base-url", server, *TOKENIZER, *SMALL, "--num-prompts", "2", "--append-result",
                     "--result-dir", str(tmp_path), "--result-filename", "all.json"]) == 0  # fmt: skip
    path = tmp_path / "all.json"
    assert len(path.read_text().splitlines()) == 2
    capsys.readouterr()
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert "runs: 2 before, 2 after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--endpoint", "/v1/chat/completions"], "not one that --backend openai can ask"),
        (["--burstiness", "2"], "--burstiness has no meaning without a finite --request-rate"),
        (["--metadata", "a=b"], "say --save-result"),
        (["--metadata", "duration=3", "--save-result"], "--metadata duration is a key"),
        (["--no-stream", "--goodput", "ttft:1"], "only e2el"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "sonnet", "--dataset-path", "x", "--random-input-len", "3"], "belongs to --dataset-name random"),
        (["--input-len", "3", "--random-input-len", "3"], "say the same"),
        (["--percentile-metrics", "ttfb"], "--percentile-metrics knows"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--best-of", "3"], "unknown flag --best-of"),
        (["--result-dir", "/no/such"], "is not a folder"),
        (["--base-url", "ftp://x"], "is not a URL"),
        (["--tokenizer", "/no/such/folder"], "--tokenizer FOLDER names it"),
        (["--profile"], "/start_profile answered 501"),
    ],
)  # fmt: skip
def test_flags_that_make_no_sense(bench, server, words, message):
    code, _, err, _ = bench(server, *words, "--num-prompts", "2", saves=False)
    assert code == 2
    assert message in err


def test_nothing_listens(bench):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _, err, _ = bench(f"http://127.0.0.1:{port}", "--ready-check-timeout-sec", "0", *SMALL, saves=False)
    assert code == 2
    assert "cannot be reached" in err
    code, lines, err, _ = bench(
        f"http://127.0.0.1:{port}", "--ready-check-timeout-sec", "0", "--model", "m", "--num-prompts", "2", *SMALL
    )
    assert code == 1
    assert lines["connection refused:"] == "2"


def event(text="", **more):
    choice = {"index": 0, "text": text, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice], **more}, ensure_ascii=False)}\n\n".encode()


END = b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@contextlib.contextmanager
def stub(*answers, seen=None):
    """A server that gives the n-th POST the n-th answer, a list of pieces with pauses in seconds between, and closes; the last again and
    again. What it is sent goes into `seen`. Yields its URL."""
    numbers = iter(range(1000))
    lock = threading.Lock()

    def serve(connection):
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            if not head.startswith(b"POST"):
                connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            if seen is not None:
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                while len(head.partition(b"\r\n\r\n")[2]) < length:
                    head += connection.recv(65536)
                seen.append(head)
            with lock:
                answer = answers[min(next(numbers), len(answers) - 1)]
            for piece in answer:
                if isinstance(piece, float):
                    time.sleep(piece)
                else:
                    connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


ALONE = ["--model", "m", "--ready-check-timeout-sec", "0", "--max-concurrency", "1", *SMALL]


def test_a_server_that_writes_byte_by_byte(bench):
    data = b"".join([event("hé"), event("😀 ü"), END, USAGE, DONE])
    chunked = [piece for byte in data for piece in (b"1\r\n", bytes([byte]), b"\r\n")]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    with stub([OK, *(bytes([byte]) for byte in data)], [head, *chunked, b"0\r\n\r\n"]) as url:
        code, _, err, found = bench(url, *ALONE, "--num-prompts", "3")
    assert code == 0, err
    assert found["generated_texts"] == ["hé😀 ü"] * 3
    assert found["output_lens"] == [2] * 3
    assert found["server"] is None


def test_times_are_those_of_the_wire(bench):
    with stub([OK, 0.2, event("a"), 0.1, event("b"), 0.3, END, USAGE, 0.2, DONE]) as url:
        _, _, _, found = bench(url, *ALONE, "--num-prompts", "1")
    assert found["ttfts"][0] >= 0.2
    assert len(found["itls"][0]) == 2
    assert found["itls"][0][1] > found["itls"][0][0]
    assert 600 <= found["mean_e2el_ms"] < found["duration"] * 1e3 - 150, "usage and [DONE] are not waited for"
    assert found["mean_tpot_ms"] == pytest.approx(sum(found["itls"][0]) * 1e3)


def test_what_is_sent(bench):
    seen = []
    more = ["--api-key", "secret", "--header", "X-Team=me", "--request-id-prefix", "b-", "--ignore-eos", "--top-k", "5",
            "--extra-body", '{"temperature": 0.5, "tag": 1}']  # fmt: skip
    with stub([OK, event("a"), END, USAGE, DONE], seen=seen) as url:
        assert bench(url, *ALONE, "--num-prompts", "1", *more)[0] == 0
        assert bench(url, *ALONE, "--num-prompts", "1", "--backend", "openai-chat", "--logprobs", "2")[0] == 0
    head, _, body = seen[0].decode().partition("\r\n\r\n")
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    sent = dict(line.split(": ", 1) for line in head.splitlines()[1:])
    assert (sent["authorization"], sent["x-team"], sent["x-request-id"]) == ("Bearer secret", "me", "b-0")
    assert sent["accept"] == "text/event-stream"
    fields = json.loads(body)
    assert fields.pop("prompt")
    assert fields == {
        "model": "m", "max_tokens": 6, "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "top_k": 5, "tag": 1,
    }  # fmt: skip
    head, _, body = seen[1].decode().partition("\r\n\r\n")
    assert head.startswith("POST /v1/chat/completions ")
    fields = json.loads(body)
    assert (fields["messages"][0]["role"], fields["max_completion_tokens"], fields["temperature"]) == ("user", 6, 0.0)
    assert (fields["logprobs"], fields["top_logprobs"]) == (True, 2)


def refusal(status, body):
    return [b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)), body]


def test_failures_by_cause(bench):
    answers = [
        [OK, event("a"), event("b"), END, USAGE, DONE],
        [OK, event("a"), b'data: {"error":{"message":"out of memory","type":"server_error"}}\n\n', DONE],
        refusal(503, b'{"error":{"message":"busy","reason":"queue_full"}}'),
        refusal(500, b"oops"),
        [OK, event("a")],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", event("a")],
        [b"SSH-2.0-x\r\n"],
        [OK, event("a"), b"data: {\n\n", DONE],
    ]
    with stub(*answers) as url:
        code, lines, err, found = bench(url, *ALONE, "--num-prompts", "8")
    assert code == 1
    assert "7 of 8 requests failed" in err
    assert (found["completed"], found["failed"]) == (1, 7)
    assert found["failures"] == {
        "error in the stream (server_error)": 1, "HTTP 503 (queue_full)": 1, "HTTP 500": 1, "ended early": 1, "connection broken": 2,
        "not JSON": 1,
    }  # fmt: skip
    assert found["errors"][:5] == ["", "out of memory", "busy", "oops", found["errors"][4]]
    assert found["total_output_tokens"] == 2, "tokens of failed answers do not count"
    assert lines["HTTP 503 (queue_full):"] == "1"


def test_a_server_that_is_not_ready_yet(bench):
    good = [OK, event("a"), event("b"), END, DONE]
    with stub(refusal(503, b""), good) as url:
        code, _, err, found = bench(url, "--model", "m", *SMALL, "--num-prompts", "2")
    assert code == 0, err
    assert all(length > 0 for length in found["output_lens"]), "tokens are counted here when the server does not say"
    with stub(refusal(400, b'{"error":{"message":"no such model"}}')) as url:
        code, _, err, _ = bench(url, "--model", "m", *SMALL, "--num-prompts", "2", saves=False)
    assert code == 2
    assert "does not answer a first request: no such model" in err
