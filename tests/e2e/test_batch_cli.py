"""`tpu-serve batch` as users run it, on the embedded model."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SMALL = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--token-buckets", "32"]


def chat(custom_id, text, **body):
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def text(custom_id, prompt, **body):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": TEXT, "body": body})


def command(*words):
    return [sys.executable, "-m", "tpu_serve.cli.main", "batch", *words, *SMALL]


def run(*words, **settings):
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=240, **settings)


def read(path):
    return [json.loads(raw) for raw in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_one_bad_line_is_one_error_line(files):
    source, output = files
    count = json.dumps({"custom_id": "c", "method": "POST", "url": "/tokenize", "body": {"prompt": "Hello", "oops": 1}})
    asked = {"input": "Hello", "temperature": 0, "max_output_tokens": 8}
    response = json.dumps({"custom_id": "d", "method": "POST", "url": "/v1/responses", "body": asked})
    lines = [chat("a", "Hello"), '{"custom_id":', text("b", "Once upon"), count, response]
    source.write_text("\n".join(lines) + "\n")
    done = run("-i", source, "-o", output)
    assert done.returncode == 1, done.stderr
    results = read(output)
    assert [result["custom_id"] for result in results] == ["a", None, "b", "c", "d"]
    assert [result["response"]["status_code"] for result in results] == [200, 400, 200, 200, 200]
    assert "Line 2" in results[1]["error"]["message"]
    assert results[0]["response"]["body"]["object"] == "chat.completion"
    assert results[2]["response"]["body"]["object"] == "text_completion"
    tokens = results[3]["response"]["body"]
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert tokens["ignored_fields"] == ["oops"]
    responded = results[4]["response"]["body"]
    said = results[0]["response"]["body"]["choices"][0]["message"]["content"]
    assert responded["output"][0]["content"][0]["text"] == said, "the same question gets the same answer"
    assert not done.stdout
    summary = json.loads(done.stderr.splitlines()[-1])
    usages = [results[place]["response"]["body"]["usage"] for place in (0, 2)]
    assert (summary["requests"], summary["failed"]) == (5, 1)
    own = responded["usage"]
    assert summary["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages) + own["input_tokens"]
    assert summary["completion_tokens"] == sum(usage["completion_tokens"] for usage in usages) + own["output_tokens"]


def test_pipes_and_every_choice():
    lines = "\n".join([chat("a", "Hello", n=9), text("b", ["One", "Two"], n=2), chat("c", "Hello")])
    done = run("-i", "-", "-o", "-", "--concurrency", "3", input=lines)
    assert done.returncode == 0, done.stderr
    results = [json.loads(raw) for raw in done.stdout.splitlines()]
    assert [result["custom_id"] for result in results] == ["a", "b", "c"]
    assert [len(result["response"]["body"]["choices"]) for result in results] == [9, 4, 1]
    answers = {choice["message"]["content"] for choice in results[0]["response"]["body"]["choices"]}
    assert answers == {results[2]["response"]["body"]["choices"][0]["message"]["content"]}, "greedy choices agree"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_was_ended_is_resumed(files, number, code):
    source, output = files
    lines = "\n".join(text(str(n), f"Story {n}", max_tokens=40, ignore_eos=True) for n in range(60)) + "\n"
    source.write_text(lines)
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command("-i", "-", "-o", output), **pipes)
    assert process.stdin is not None
    process.stdin.write(lines)
    process.stdin.flush()  # and stays open: the thread that reads it is stuck for good
    deadline = time.monotonic() + 200
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    process.stdin.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert "--resume continues" in stderr
    assert "Traceback" not in stderr
    before = output.read_bytes()
    assert 0 < len(read(output)) < 60
    with output.open("ab") as file:
        file.write(b'{"id": "cut off')
    done = run("-i", source, "-o", output, "--resume")
    assert done.returncode == 0, done.stderr
    assert output.read_bytes().startswith(before)
    assert [result["custom_id"] for result in read(output)] == [str(n) for n in range(60)]
    assert json.loads(done.stderr.splitlines()[-1])["requests"] == 60 - before.count(b"\n")


def test_what_cannot_run_is_exit_code_2(files):
    source, output = files
    source.write_text(chat("a", "Hello"))
    done = run("-i", source, "-o", output, "no/such/folder/anywhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("tpu-serve: error: ")


def test_progress_is_shown_on_request(files):
    source, output = files
    source.write_text("\n".join(text(str(n), "One") for n in range(3)))
    done = run("-i", source, "-o", output, "--progress", env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr
    assert "3/3" in done.stderr
    assert "tokens/s" in done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["requests"] == 3
