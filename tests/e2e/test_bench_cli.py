"""`tpu-serve bench` as users run it, on the embedded model."""

import json
import subprocess
import sys

import pytest

from tpu_serve.cli.main import main

SMALL = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--token-buckets", "64"]


def run(*words):
    command = [sys.executable, "-m", "tpu_serve.cli.main", "bench", *words, *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_prefill(tmp_path):
    file = tmp_path / "prefill.json"
    config = tmp_path / "serve.yaml"
    config.write_text("input-len: [5, 33]\nbatch_size: [1, 3]\nnum-iters: 9\nport: 8000\nenable-prefix-caching: true\n")
    cases = ["--config", config, "--num-iters", "3", "--num-iters-warmup", "1"]
    done = run("prefill", *cases, "--output-json", file)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["device"]["platform"] == "cpu"
    assert document["compiles"]["during"] == 0, "every program exists before the first request"
    assert document["warnings"] == []
    cases = [(result["input_len"], result["batch_size"], result["num_steps"]) for result in document["results"]]
    assert cases == [(5, 1, 1), (5, 3, 1), (33, 1, 1), (33, 3, 2)]
    for result in document["results"]:
        latency = result["latency_ms"]
        assert len(result["samples_ms"]) == 3
        assert result["bound_share"] == pytest.approx(result["bound_ms"] / latency["median"])
        assert result["bound_ms"] > 0
        assert 0 < latency["min"] <= latency["median"] <= latency["p99"]
        speed = result["tokens_per_second"]
        assert f"{speed:.{3 if speed < 100 else 1}f}" in done.stdout
    assert "platform cpu" in done.stdout
    assert "--enable-prefix-caching is off here" in done.stderr
    assert "--port is about the HTTP server" in done.stderr
    assert document["bound"]["rates"] == "measured"


def test_decode(tmp_path):
    file = tmp_path / "decode.json"
    cases = ["--input-len", "8", "--batch-size", "1", "4", "--output-len", "6", "--num-iters", "2"]
    done = run("decode", *cases, "--output-json", file, "--seed", "3")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["compiles"]["during"] == 0
    assert document["settings"]["seed"] == 3
    assert document["settings"]["output_len"] == 6
    assert not document["engine_options"]["enable_prefix_caching"]
    assert [len(result["samples"]["step_ms"]) for result in document["results"]] == [8, 8]
    assert all(result["num_preemptions"] == 0 for result in document["results"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prefill", "--input-len", "128"], "129 tokens do not fit the context of 128"),
        (["decode", "--input-len", "100", "--output-len", "29"], "129 tokens do not fit the context of 128"),
        (["decode", "--output-len", "2"], "--output-len must be at least 3"),
        (["decode", "--batch-size", "5"], "needs --max-num-seqs 5"),
        (["prefill", "--config", "no/such/file"], "--config no/such/file cannot be read"),
        (["prefill", "--output-json", "no/such/folder/file"], "cannot be written"),
        (["prefill", "no/such/folder"], "no/such/folder"),
    ],
)
def test_what_cannot_run_is_said_before_weights_are_read(words, message, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("nothing should be built")

    monkeypatch.setattr("tpu_serve.bench.run.build_engine", refuse)
    assert main(["bench", *words, *SMALL]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("tpu-serve: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert not shown.out
