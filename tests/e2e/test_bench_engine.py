"""`tpu-serve bench latency`, `throughput` and `startup` on the embedded model, in this process where they run in one."""

import json
import re
import subprocess

import pytest

from tpu_serve.bench import startup
from tpu_serve.bench.driver import Run, Step
from tpu_serve.bench.latency import first_tokens
from tpu_serve.bench.startup import bench_startup
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError, EngineConfig

SMALL = ["--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--token-buckets", "64"]


@pytest.fixture
def bench(capsys, tmp_path):
    """Runs a benchmark that must succeed; returns what it printed and the file."""

    def bench(*words):
        path = tmp_path / "found.json"
        code = main(["bench", *words, *SMALL, "--output-json", str(path)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out, json.loads(path.read_text())

    return bench


def test_latency(bench):
    out, found = bench(
        "latency", "--input-len", "6", "--output-len", "5", "--batch-size", "2", "--n", "2", "--num-iters", "3", "--num-iters-warmup", "1"
    )  # fmt: skip
    average = float(re.search(r"^Avg latency: (\S+) seconds$", out, re.MULTILINE)[1])
    assert average == found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert re.findall(r"^(\d+)% percentile latency: ", out, re.MULTILINE) == ["10", "25", "50", "75", "90", "99"]
    assert found["percentiles"]["50"] == sorted(found["latencies"])[1]
    assert found["model_id"].endswith("tiny-chat")
    assert 0 < found["prefill_ms"]["min"] < found["avg_latency"] * 1e3
    assert found["step_ms"]["min"] > 0
    assert re.search(r"^Prefill: median .* ms to the first token of all$", out, re.MULTILINE)
    assert re.search(r"^Decode: median .* ms per step$", out, re.MULTILINE)
    assert found["compiles_during"] == 0


def test_the_first_tokens_of_a_batch():
    steps = [Step(1.0, ("a",), True, 1), Step(2.5, ("a", "b"), True, 2), Step(3.0, ("a", "b"), False, 2)]
    assert first_tokens(Run(steps), 2) == 2.5
    assert first_tokens(Run(steps), 1) == 1.0


def test_a_trace(capsys, tmp_path):
    words = ["--output-len", "2", "--input-len", "2", "--batch-size", "1", "--num-iters-warmup", "0", "--profile"]
    assert main(["bench", "latency", *words, *SMALL]) == 2
    assert "--profile-result-dir" in capsys.readouterr().err
    assert main(["bench", "latency", *words, *SMALL, "--profile-result-dir", str(tmp_path)]) == 0
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize("extra", [["--disable-detokenize"], ["--async-engine"]])
def test_throughput(bench, extra):
    out, found = bench("throughput", "--num-prompts", "3", "--n", "2", "--input-len", "9", "--output-len", "4", *extra)
    said = re.search(
        r"^Throughput: (\S+) requests/s, (\S+) total tokens/s, (\S+) output tokens/s$", out, re.MULTILINE
    ).groups()
    assert [float(word) for word in said] == pytest.approx(
        [found["requests_per_second"], found["tokens_per_second"], 24 / found["elapsed_time"]], abs=0.006
    )
    assert (found["num_requests"], found["num_output_tokens"]) == (3, 24)
    assert found["total_num_tokens"] == found["num_prompt_tokens"] + 24
    assert "Total num output tokens:  24" in out
    assert found["steps"]["prefill"]["num_steps"] >= 1
    assert found["steps"]["decode"]["num_tokens"] > 0
    assert found["compiles_during"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["throughput", "--async-engine", "--disable-detokenize"], "--disable-detokenize has no meaning"),
        (["throughput", "--dataset-path", "x"], "--dataset-path has no meaning for --dataset-name random"),
        (["latency", "--output-len", "200"], "232 tokens do not fit the context of 128"),
        (["latency", "--batch-size", "3", "--n", "2", "--output-len", "4"], "needs --max-num-seqs 6"),
        (
            ["throughput", "--num-prompts", "2", "--input-len", "120", "--output-len", "19"],
            "tokens do not fit the context of 128",
        ),
        (["startup", "--num-iters-cold", "0", "--num-iters-warm", "0"], "nothing to measure"),
        (["startup", "--compile-cache-dir", "off"], "leaves nothing warm"),
        (["startup", "--output-json", "no/such/folder/x"], "cannot be written"),
    ],
)
def test_what_cannot_run(words, message, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("nothing should be built")

    for module in ("run", "throughput"):
        monkeypatch.setattr(f"tpu_serve.bench.{module}.build_engine", refuse)
    monkeypatch.setattr(startup, "start_once", refuse)
    assert main(["bench", *words, *SMALL]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["latency", "throughput", "startup"])
def test_engine_flags_of_other_programs_are_known(kind, monkeypatch, caplog, capsys):
    def stop(*_, **__):
        raise ConfigError("far enough")

    for name in ("latency.bench_latency", "throughput.bench_throughput", "startup.bench_startup"):
        monkeypatch.setattr(f"tpu_serve.bench.{name}", stop)
    assert main(["bench", kind, *SMALL, "--enforce-eager", "--trust-remote-code", "--enable-chunked-prefill"]) == 2
    assert "far enough" in capsys.readouterr().err
    assert [record.getMessage().split()[0] for record in caplog.records] == ["--enforce-eager", "--trust-remote-code"]
    assert main(["bench", kind, *SMALL, "--enable-lora"]) == 2
    assert "merge the adapter" in capsys.readouterr().err


def test_one_start_in_a_process_of_its_own(bench):
    out, found = bench("startup", "--num-iters-cold", "0", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    (phases,) = found["warm_phases"]
    assert {"import", "config", "tokenizer", "weights", "compile", "ready", "first_token"} <= phases.keys()
    parts = sum(seconds for name, seconds in phases.items() if name not in ("ready", "first_token"))
    assert phases["ready"] == pytest.approx(parts), "the phases are all of it"
    assert found["avg_warm_startup_time"] == phases["ready"]
    assert f"Warm startup time: {phases['ready']:.2f} seconds" in out
    assert "Cold" not in out


def test_cold_starts_have_an_empty_folder_each_and_warm_ones_the_users(tmp_path):
    seen = []

    def run(options):
        folder = options["compile_cache_dir"]
        seen.append(folder)
        return {"import": 1.0, "compile": 5.0 if folder != "warm" else 0.5, "ready": 9.0 if folder != "warm" else 2.0}

    config = EngineConfig.from_options(compile_cache_dir="warm", max_num_seqs=3)
    found = bench_startup(config, 2, 1, 3, lambda: None, run)
    assert len(set(seen[:2])) == 2
    assert seen[2:] == ["warm"] * 4
    document = found.document()
    assert document["cold_startup_times"] == [9.0, 9.0]
    assert document["avg_warm_compilation_time"] == 0.5
    assert "Cold startup time: 9.00 seconds" in found.text()


def test_a_start_that_fails_says_why(monkeypatch):
    def ends(code, out, err):
        monkeypatch.setattr(startup.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, out, err))

    ends(2, 'noise\n{"error": "There is no folder."}\n', "")
    with pytest.raises(ConfigError, match=r"^There is no folder\.$"):
        startup.start_once({})
    ends(-9, "", "line\nkilled")
    with pytest.raises(ConfigError, match="ended with -9: line killed"):
        startup.start_once({})
