"""The rules of `tpu-serve batch`, with handlers that answer from a script."""

import asyncio
import json

import pytest

from tpu_serve.cli.batch_file import BatchLine, ResultWriter, read_lines
from tpu_serve.cli.batch_job import Batch
from tpu_serve.cli.progress import Progress
from tpu_serve.config import ConfigError
from tpu_serve.request import InvalidRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id, url=CHAT, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode() + b"\n"


class FakeServer:
    """Answers with the body's `say`. `wait` is how many other answers must come first, `seconds` a delay; `status` and `crash` fail."""

    def __init__(self):
        self.started, self.num_done, self.num_live, self.most_live = [], 0, 0, 0
        self.failure = None
        self.num_refusals = 0

    async def answer(self, body):
        self.started.append(body.get("say"))
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            await asyncio.sleep(body.get("seconds", 0))
            while self.num_done < body.get("wait", 0):
                await asyncio.sleep(0.001)
            if self.num_refusals:
                self.num_refusals -= 1
                raise InvalidRequest(None, "busy", "queue_full", 503)
            if "status" in body:
                raise InvalidRequest("say", "cannot say that", "invalid_value", body["status"])
            if "crash" in body:
                raise RuntimeError("crash")
            if "dies" in body:
                self.failure = "the engine failed"
                raise RuntimeError("dead")
        finally:
            self.num_live -= 1
        self.num_done += 1
        return {
            "id": f"answer-{body['say']}",
            "say": body["say"],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        }


def run(lines, path, *, server=None, concurrency=4, ordered=True, resume=False):
    """Runs a batch over lines; returns (results, totals)."""
    server = server or FakeServer()
    writer = ResultWriter.open(path, resume=resume)
    writer.start()
    batch = Batch(writer, Progress(None, "requests", shown=False), concurrency=concurrency, ordered=ordered)
    try:
        asyncio.run(batch.run(iter(lines), {CHAT: server.answer, TEXT: server.answer}, lambda: server.failure))
    finally:
        writer.close()
    return read_results(path), batch.totals


def read_results(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def ids(results):
    return [result["custom_id"] for result in results]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def test_a_result_has_the_documented_form(path):
    (result,), totals = run([line("a", say="hello")], path)
    body = {"id": "answer-hello", "say": "hello", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert result.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "answer-hello", "body": body}
    assert result == {"custom_id": "a", "response": response, "error": None}
    summary = totals.as_json()
    assert set(summary) == {
        "requests", "failed", "resumed", "prompt_tokens", "completion_tokens", "seconds", "tokens_per_second",
    }  # fmt: skip
    assert (summary["requests"], summary["failed"], summary["prompt_tokens"], summary["completion_tokens"]) == (
        1,
        0,
        3,
        2,
    )


BAD_LINES = {
    "syntax": (b'{"custom_id":\n', None, "invalid_json", "Line 2: The line is not JSON"),
    "not UTF-8": (b'{"custom_id": "\xff"}\n', None, "invalid_json", "Line 2: The line is not UTF-8"),
    "too deep": (b"[" * 100_000 + b"\n", None, "invalid_json", "Line 2: The line is not JSON"),
    "array": (b"[1]\n", None, "invalid_json", "Line 2: The line must be a JSON object"),
    "no id": (b'{"method": "POST"}\n', None, "missing_required_parameter", "custom_id must be a string"),
    "id is a number": (b'{"custom_id": 5}\n', None, "invalid_value", "custom_id must be a string"),
    "no method": (b'{"custom_id": "x"}\n', "x", "missing_required_parameter", 'method must be "POST"'),
    "method": (b'{"custom_id": "x", "method": "GET"}\n', "x", "invalid_value", 'method must be "POST"'),
    "no url": (b'{"custom_id": "x", "method": "POST"}\n', "x", "missing_required_parameter", f"{CHAT}, {TEXT}"),
    "url": (line("x", "/v1/embeddings"), "x", "invalid_value", "got '/v1/embeddings'"),
    "url is a list": (line("x", [CHAT]), "x", "invalid_value", "url must be one of"),
    "no body": (
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}\n', "x",
        "missing_required_parameter", "body must be a JSON object",
    ),
    "body": (
        b'{"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": []}\n', "x",
        "invalid_value", "body must be a JSON object",
    ),
    "stream": (line("x", say="x", stream=True), "x", "invalid_value", "cannot be streamed"),
    "duplicate": (line("first", say="again"), "first", "duplicate_custom_id", "'first' is taken by an earlier line"),
    "refused": (line("x", say="x", status=404), "x", "invalid_value", "cannot say that"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_one_error_line_and_the_rest_goes_on(name, path):
    raw, custom_id, reason, message = BAD_LINES[name]
    results, totals = run([line("first", say="1"), raw, line("last", TEXT, say="2")], path)
    assert ids(results) == ["first", custom_id, "last"]
    bad = results.pop(1)
    assert [result["error"] for result in results] == [None, None]
    assert bad["response"]["status_code"] == (404 if name == "refused" else 400)
    assert bad["error"]["reason"] == reason
    assert message in bad["error"]["message"]
    assert bad["response"]["body"]["error"].items() <= bad["error"].items()
    assert bad["error"].get("line") == (None if name == "refused" else 2)
    assert (totals.num_requests, totals.num_failed) == (3, 1)


def test_an_unexpected_failure_is_the_line_s_own(path, caplog):
    results, totals = run([line("a", say="1", crash=1), line("b", say="2")], path)
    assert [result["response"]["status_code"] for result in results] == [500, 200]
    assert totals.num_failed == 1
    assert "RuntimeError: crash" in caplog.text
    assert "crash" not in results[0]["error"]["message"]


def test_blank_lines_and_a_byte_order_mark_are_nothing(path):
    results, totals = run([b"\xef\xbb\xbf" + line("a", say="1"), b"\n", b"  \r\n", line("b", say="2").rstrip()], path)
    assert ids(results) == ["a", "b"]
    assert totals.num_failed == 0


def test_any_text_makes_one_line(path):
    strange = "line\u2028separator\x85 \ud800 \U0001f600\n"
    (result,), _ = run([line(strange, say=strange)], path)
    assert (result["custom_id"], result["response"]["body"]["say"]) == (strange, strange)
    assert path.read_bytes().count(b"\n") == 1
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_lines_in_flight_are_bounded(path, concurrency):
    server = FakeServer()
    lines = [line(str(n), say=n, seconds=0.01) for n in range(30)]
    results, _ = run(lines, path, server=server, concurrency=concurrency)
    assert server.most_live == concurrency
    assert ids(results) == [str(n) for n in range(30)]


def test_order_is_kept_by_holding_back(path):
    lines = [line("slow", say=0, wait=5), *(line(str(n), say=n) for n in range(1, 6)), line("end", say=9)]
    results, _ = run(lines, path, concurrency=4)
    assert ids(results) == ["slow", "1", "2", "3", "4", "5", "end"]


def test_unordered_results_do_not_wait_for_earlier_lines(path):
    server = FakeServer()

    async def answer(body):
        while body["say"] == "slow" and not path.read_bytes():
            await asyncio.sleep(0.001)
        return await server.answer(body)

    writer = ResultWriter.open(path, resume=False)
    batch = Batch(writer, Progress(None, "requests", shown=False), concurrency=2, ordered=False)
    lines = [line(name, say=name) for name in ("slow", "b", "c", "d")]
    asyncio.run(batch.run(lines, {CHAT: answer}, lambda: None))
    writer.close()
    names = ids(read_results(path))
    assert sorted(names) == ["b", "c", "d", "slow"]
    assert names[0] != "slow"


def test_results_held_back_are_bounded(path):
    server = FakeServer()
    held = 16 * 2
    lines = [line("slow", say=0, wait=held - 1), *(line(str(n), say=n) for n in range(1, 100))]
    started_when_slow_ended = []

    async def answer(body):
        reply = await server.answer(body)
        if body["say"] == 0:
            started_when_slow_ended.append(len(server.started))
        return reply

    writer = ResultWriter.open(path, resume=False)
    batch = Batch(writer, Progress(None, "requests", shown=False), concurrency=2, ordered=True)
    asyncio.run(batch.run(iter(lines), {CHAT: answer}, lambda: None))
    writer.close()
    assert started_when_slow_ended == [held]
    assert len(read_results(path)) == 100


def test_a_slow_source_does_not_hold_up_results(path):
    """A pipe: the second line comes only after the first one's result is in the file."""

    def lines():
        yield line("a", say="1")
        while not path.read_bytes():
            pass
        yield line("b", say="2")

    assert ids(run(lines(), path)[0]) == ["a", "b"]


def test_a_source_that_fails_ends_the_run(path):
    def lines():
        yield line("a", say="1")
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        run(lines(), path)


def test_a_full_queue_is_waited_for(path):
    server = FakeServer()
    server.num_refusals = 3
    results, totals = run([line(str(n), say=n) for n in range(4)], path, server=server)
    assert ids(results) == ["0", "1", "2", "3"]
    assert totals.num_failed == 0


def test_a_dead_engine_ends_the_run_and_keeps_what_is_written(path):
    lines = [line("a", say="1"), line("b", say="2", dies=1, wait=1), line("c", say="3", wait=9)]
    with pytest.raises(ConfigError, match=r"the engine failed.*--resume"):
        run(lines, path, concurrency=3)
    assert ids(read_results(path)) == ["a"]
    lines = [line("a", say="1"), line("b", say="2"), line("c", say="3")]
    assert ids(run(lines, path, resume=True)[0]) == ["a", "b", "c"]


class TestResume:
    LINES = (line("a", say="1"), b"{\n", line("b", say="2", status=400), line("a", say="3"), line("c", say="4"))

    def test_answered_lines_are_skipped(self, path):
        run(self.LINES[:4], path)
        before = path.read_bytes()
        server = FakeServer()
        results, totals = run(self.LINES, path, server=server, resume=True)
        assert path.read_bytes().startswith(before)
        assert ids(results) == ["a", None, "b", "a", "c"]
        assert server.started == ["4"]
        assert (totals.num_requests, totals.num_resumed, totals.num_failed) == (1, 4, 3)

    @pytest.mark.parametrize("num_bytes", [1, 40, -1])
    def test_a_cut_last_line_is_done_again(self, path, num_bytes):
        run(self.LINES, path)
        *whole, last = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(whole) + last[:num_bytes])
        server = FakeServer()
        results, _ = run(self.LINES, path, server=server, resume=True)
        assert ids(results) == ["a", None, "b", "a", "c"]
        assert server.started == ["4"]

    def test_a_bad_line_that_was_mended_is_done(self, path):
        run([line("a", say="1"), b"{\n", line("c", say="3")], path)
        results, totals = run([line("a", say="1"), line("b", say="2"), line("c", say="3")], path, resume=True)
        assert ids(results) == ["a", None, "c", "b"]
        assert (totals.num_requests, totals.num_resumed, totals.num_failed) == (1, 2, 0)

    def test_results_out_of_order_are_known_too(self, path):
        """The duplicate's error came before the answer, which never came."""
        run([line("z", say="0", status=400), line("a", say="1"), line("a", say="2")], path, ordered=False)
        kept = [text for text in path.read_bytes().splitlines(keepends=True) if b"duplicate" in text]
        path.write_bytes(b"".join(kept))
        results, _ = run([line("z", say="0"), line("a", say="1"), line("a", say="2")], path, resume=True)
        assert [result["response"]["status_code"] for result in results] == [400, 200, 200]

    def test_without_a_file_it_begins(self, path):
        assert ids(run(self.LINES[:1], path, resume=True)[0]) == ["a"]

    def test_a_file_of_something_else_is_left_alone(self, path):
        path.write_text('{"my": "data"}\n')
        with pytest.raises(ConfigError, match=r"Line 1 of .* is not a result"):
            ResultWriter.open(path, resume=True)
        assert path.read_text() == '{"my": "data"}\n'

    def test_without_resume_the_file_is_replaced_when_it_starts(self, path):
        path.write_text("old\n")
        writer = ResultWriter.open(path, resume=False)
        assert path.read_text() == "old\n"
        writer.start()
        writer.close()
        assert path.read_text() == ""


def test_lines_know_their_number_and_key():
    lines = list(read_lines([b"\n", line("a", say=1), b"{", line("a", say=1)], [CHAT]))
    assert [(item.number, item.key) for item in lines] == [(2, "a"), (3, 3), (4, 4)]
    assert BatchLine(number=1, custom_id="x").key == "x"
