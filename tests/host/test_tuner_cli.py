"""`tpu-serve tune` on the command line: what may be asked for, what is written, and how it ends."""

import dataclasses
import json

import pytest
from cases import FIXTURES
from tuner_fakes import Fake

from tpu_serve.bench.journal_file import versions
from tpu_serve.cli import main as cli
from tpu_serve.cli import tune
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.tuner import compiling, measuring, rows
from tpu_serve.tuner.jobs import Selection, jobs_of
from tpu_serve.tuner.journal import Journal
from tpu_serve.tuner.trial import BYTES, REFUSED, Trial
from tpu_serve.tuning_tables.table import Provenance

CHOICE = ["--chip", "v6e", "--workload", "Qwen3-30B-A3B", "--format", "bfloat16", "--num-devices", "8"]


@pytest.fixture(autouse=True)
def only_tune(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", (tune,))


def run(*words):
    return cli.main(["tune", "fused_moe_v2", *map(str, words)])


def compile_only(folder, *words, tokens=(16, 64)):
    return run("--compile-only", *CHOICE, "--num-tokens", *tokens, "--output-dir", folder, *words)


class Compiler(Fake):
    """In place of the compiler. 64 tokens: as told."""

    def __init__(self, monkeypatch, of_64=lambda number: 1.0):
        super().__init__(self.told, BYTES)
        self.of_64, self.made = of_64, []
        for kind in ("Compile", "Schedule"):
            monkeypatch.setattr(compiling, kind, lambda timeout, stop, kind=kind: self.made.append(kind) or self)

    def told(self, task, number):
        return self.of_64(number) if task.problem.num_tokens == 64 else 1.0


def table(folder):
    return rows.read(folder, TPU_CHIPS["v6e"]).entries


def test_rows_are_written_and_told(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    folder = tmp_path / "a" / "b"
    assert compile_only(folder, "--report", tmp_path / "page.html") == 0
    said = capsys.readouterr()
    assert "2 keys: 2 tuned, 0 refused, 0 failed" in said.out
    assert "Qwen3-30B-A3B-v6e-bfloat16-D8-T64  mode D" in said.err
    assert [row.key.num_tokens for row in table(folder)] == [16, 64]
    assert {row.provenance.kind for row in table(folder)} == {"compiled"}
    assert (folder / "tune.jsonl").read_text().count('"candidate"') > 2
    assert "<h1>Configs of fused_moe_v2: compiled" in (tmp_path / "page.html").read_text()


def test_what_is_refused_is_told_and_has_no_row(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    words = [
        "--compile-only",
        *CHOICE[:4],
        "--format",
        "bfloat16",
        "fp8_channel",
        "--num-devices",
        8,
        "--num-tokens",
        64,
    ]
    assert run(*words, "--output-dir", tmp_path) == 0
    said = capsys.readouterr()
    assert "2 keys: 1 tuned, 1 refused, 0 failed" in said.out
    assert "fp8_channel-D8-T64  refused: format fp8_channel has products in float8_e4m3fn" in said.err
    assert [row.key.format for row in table(tmp_path)] == ["bfloat16"]


def test_a_key_without_a_config_is_a_failure(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch, lambda number: Trial(REFUSED, "MosaicError: no"))
    assert compile_only(tmp_path) == 1
    said = capsys.readouterr()
    assert "2 keys: 1 tuned, 0 refused, 1 failed" in said.out
    assert "T64  failed: none of" in said.err
    assert [row.key.num_tokens for row in table(tmp_path)] == [16]


def test_interrupted_and_continued(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch, lambda number: KeyboardInterrupt())
    page = tmp_path / "page.html"
    assert compile_only(tmp_path, "--report", page) == 130
    said = capsys.readouterr()
    assert "1 of 2 keys are done, what was found is written; --resume continues" in said.err
    assert [row.key.num_tokens for row in table(tmp_path)] == [16]
    assert "T16" in page.read_text()

    again = Compiler(monkeypatch)
    assert compile_only(tmp_path, "--resume") == 0
    assert {task.problem.num_tokens for task in again.tasks} == {64}
    assert "tries are in the journal" in capsys.readouterr().err
    assert [row.key.num_tokens for row in table(tmp_path)] == [16, 64]


def test_a_layer_of_a_model_folder(monkeypatch, tmp_path):
    """Its sizes are from config.json; the workloads are left out unless they are named too."""
    compiler = Compiler(monkeypatch)
    words = ["--compile-only", "--chip", "v6e", "--num-devices", 4, "--num-tokens", 16, "--model", FIXTURES / "mixtral"]
    assert run(*words, "--output-dir", tmp_path / "a") == 0
    (row,) = table(tmp_path / "a")
    config = json.loads((FIXTURES / "mixtral" / "config.json").read_text())
    assert (row.key.hidden, row.key.intermediate) == (config["hidden_size"], config["intermediate_size"])
    assert (row.key.num_experts, row.key.num_devices) == (config["num_local_experts"], 4)
    assert {task.problem.sequence_parallel for task in compiler.tasks} == {True}
    assert run(*words, "--workload", "GPT-OSS-120B", "--output-dir", tmp_path / "b") == 0
    assert len(table(tmp_path / "b")) == 2


def test_a_report_and_a_journal_in_the_folder_that_is_made(monkeypatch, tmp_path):
    Compiler(monkeypatch)
    folder = tmp_path / "new"
    assert compile_only(folder, "--report", folder / "page.html", "--journal", folder / "tries.jsonl") == 0
    assert {one.name for one in folder.iterdir()} == {"v6e", "page.html", "tries.jsonl"}


def test_a_row_that_stays_because_it_is_more_trusted_is_told(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    assert compile_only(tmp_path, tokens=(16,)) == 0
    (row,) = table(tmp_path)
    known = Provenance("measured", "2026-11-30", versions()["jax"], us=5.0)
    rows.merge_into(tmp_path, TPU_CHIPS["v6e"], [dataclasses.replace(row, provenance=known)], versions()["jax"])
    capsys.readouterr()
    assert compile_only(tmp_path, tokens=(16,)) == 0
    said = capsys.readouterr().err
    assert "T16  not written: " in said
    assert "has a row that is more trusted" in said
    assert table(tmp_path)[0].provenance == known


def test_a_journal_has_one_writer(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    with Journal(tmp_path / "tune.jsonl", resume=False):
        assert compile_only(tmp_path) == 2
    assert "is being written by another process; name another one" in capsys.readouterr().err
    assert compile_only(tmp_path, "--journal", "/dev/null") == 2
    assert "--journal /dev/null cannot be written: it is no file" in capsys.readouterr().err


def test_only_what_is_missing(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    assert compile_only(tmp_path, tokens=(16,)) == 0
    again = Compiler(monkeypatch)
    assert compile_only(tmp_path, "--missing") == 0
    assert {task.problem.num_tokens for task in again.tasks} == {64}
    assert [row.key.num_tokens for row in table(tmp_path)] == [16, 64]
    assert compile_only(tmp_path, "--missing") == 0
    assert "0 keys: 0 tuned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "kind"),
    [([], "Schedule"), (["--candidates", 1], "Compile"), (["--score", "bytes"], "Compile"), (["--candidates", 1, "--score", "schedule"], "Schedule")],
)  # fmt: skip
def test_the_score(monkeypatch, tmp_path, words, kind):
    compiler = Compiler(monkeypatch)
    assert compile_only(tmp_path, *words, tokens=[16]) == 0
    assert compiler.made == [kind]
    if "--candidates" in words:
        assert len(compiler.tasks) == 1


BAD = {
    "kernel": (["--compile-only"], "KERNEL moe is unknown; known are fused_moe_v2, experts."),
    "chip": (["--compile-only", "--chip", "v9"], "--chip v9 is unknown; known are v5e, v5p, v6e, tpu7x."),
    "workload": (["--workload", "GPT"], "--workload GPT is unknown; known are Qwen3-30B-A3B, "),
    "format": (["--format", "fp1"], "--format fp1 is unknown; known are float32, bfloat16, "),
    "tokens": (["--num-tokens", "100"], "--num-tokens 100 is unknown; known are 8, 16, 32, "),
    "devices": (["--num-devices", "3"], "--num-devices 3: v5e has no slice of 3 devices; there are 1, 2, 4, "),
    "score": (["--compile-only", "--score", "best"], "--score best is unknown; known are bytes, schedule."),
    "score on a TPU": (["--score", "bytes"], "--score is for --compile-only"),
    "jobs on a TPU": (["--jobs", "2"], "--jobs is for --compile-only"),
    "counts": (["--compile-only", "--routing-counts", "x"], "--routing-counts is for measuring"),
    "journal": (["--journal", "/no/where/x"], "--journal /no/where/x cannot be written"),
    "report": (["--report", "/no/where/x"], "--report /no/where/x cannot be written"),
    "candidates": (["--candidates", "0"], "--candidates"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line_and_nothing_is_written(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measuring.Measure, "devices", lambda self: pytest.fail("work was begun"))
    words, message = BAD[name]
    folder = tmp_path / "tables"
    kernel = "moe" if name == "kernel" else "fused_moe_v2"
    assert cli.main(["tune", kernel, *words, "--output-dir", str(folder)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not folder.exists()


def test_a_damaged_table_is_found_before_any_work(monkeypatch, tmp_path, capsys):
    compiler = Compiler(monkeypatch)
    (tmp_path / "v6e").mkdir()
    (tmp_path / "v6e" / "fused_moe_v2.json").write_text("{")
    assert compile_only(tmp_path) == 2
    assert "is damaged" in capsys.readouterr().err
    assert compiler.tasks == []


def test_without_a_tpu_it_says_what_there_is(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measuring.Measure, "devices", lambda self: ("cpu", "cpu", 1))
    assert run(*CHOICE, "--output-dir", tmp_path) == 2
    assert "tune measures on a TPU, and here is none (cpu). There is --compile-only" in capsys.readouterr().err


def on_four_v6e(monkeypatch, executor):
    monkeypatch.setattr(measuring.Measure, "devices", lambda self: ("tpu", "v6e", 4))
    monkeypatch.setattr(measuring.Measure, "run", lambda self, task: executor.run(task))


def test_on_a_tpu(monkeypatch, tmp_path, capsys):
    fake = Fake(lambda task, number: 200.0 if task.config is None else 100.0)
    on_four_v6e(monkeypatch, fake)
    assert run("--workload", "Qwen3-30B-A3B", "--num-tokens", 16, "--format", "bfloat16", "--output-dir", tmp_path) == 0
    (row,) = table(tmp_path)
    assert (row.key.num_devices, row.provenance.kind, row.min_tokens_fused) == (4, "measured", 0)
    assert row.provenance.routing == "uniform|zipf1.0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chip", "v5e"], "--chip v5e cannot be measured on v6e"),
        (["--num-devices", "4", "8"], "--num-devices 8 is more than the 4 v6e devices that are here"),
    ],
)
def test_what_this_tpu_is_not(monkeypatch, tmp_path, capsys, words, message):
    on_four_v6e(monkeypatch, Fake(lambda task, number: pytest.fail("nothing is measured")))
    assert run(*words, "--output-dir", tmp_path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must hold a list of counts"),
        ("[1, -2]", "must hold a list of counts"),
        ("[0, 0]", "must hold a list of counts"),
        ("[1, true]", "must hold a list of counts"),
        ("[1", "is not JSON"),
        ("[1, 2]", "--routing-counts has 2 counts, the layer 128 experts"),
        (None, "cannot be read"),
    ],
)
def test_counts_that_make_no_sense(monkeypatch, tmp_path, capsys, text, message):
    on_four_v6e(monkeypatch, Fake(lambda task, number: pytest.fail("nothing is measured")))
    file = tmp_path / "counts.json"
    if text is not None:
        file.write_text(text)
    assert run("--workload", "Qwen3-30B-A3B", "--routing-counts", file, "--output-dir", tmp_path / "out") == 2
    assert message in capsys.readouterr().err


def test_captured_counts_are_measured_too(monkeypatch, tmp_path):
    on_four_v6e(monkeypatch, Fake(lambda task, number: 100.0))
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(list(range(128))))
    words = ["--workload", "Qwen3-30B-A3B", "--num-tokens", 16, "--format", "bfloat16", "--routing-counts", file]
    assert run(*words, "--output-dir", tmp_path) == 0
    (row,) = table(tmp_path)
    assert row.provenance.routing.startswith("uniform|zipf1.0|capture:")


def test_the_jobs_of_a_selection():
    every = jobs_of(Selection())
    assert len({(job.chip.name, job.key) for job in every}) == len(every) > 1000
    assert {job.problem.num_devices for job in every} == {4, 8, 16}
    named = jobs_of(Selection(chips=("v6e", "v6e"), formats=("fp8_channel",), tokens=(16,), device_counts=(2,)))
    assert len(named) == 6, "every layer in the format that is named, on a chip that cannot run it too"


def verify(folder, *words):
    return run("--compile-only", "--verify", "--output-dir", folder, *words)


def test_rows_are_compiled_again_and_bad_ones_told(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    assert compile_only(tmp_path, tokens=(16, 32, 64)) == 0
    before = (tmp_path / "v6e" / "fused_moe_v2.json").read_bytes()
    again = Compiler(monkeypatch)
    assert verify(tmp_path) == 0
    assert "3 of 3 rows: 3 compile, 0 do not" in capsys.readouterr().out
    assert again.made == ["Compile"], "whatever the score of a search would be"
    assert {task.config for task in again.tasks} == {row.value for row in table(tmp_path)}
    Compiler(monkeypatch, lambda number: Trial(REFUSED, "MosaicError: no"))
    assert verify(tmp_path) == 1
    said = capsys.readouterr()
    assert "3 of 3 rows: 2 compile, 1 do not" in said.out
    assert "v6e bfloat16 8 devices, 64 tokens, 8 of 128 experts 2048x768  refused: MosaicError: no" in said.err
    assert (tmp_path / "v6e" / "fused_moe_v2.json").read_bytes() == before


def test_a_row_that_is_no_longer_legal_needs_no_compiler(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    assert compile_only(tmp_path, tokens=(16,)) == 0
    path = tmp_path / "v6e" / "fused_moe_v2.json"
    path.write_text(path.read_text().replace('"tile_columns": 768', '"tile_columns": 640'))
    again = Compiler(monkeypatch)
    assert verify(tmp_path) == 1
    assert "refused: tile_columns 640 must be a multiple of 128 that divides 768" in capsys.readouterr().err
    assert not again.tasks


def test_a_sample_of_rows_is_evenly_spaced(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    assert compile_only(tmp_path, tokens=(8, 16, 32, 64)) == 0
    again = Compiler(monkeypatch)
    assert verify(tmp_path, "--sample", 2) == 0
    assert [task.problem.num_tokens for task in again.tasks] == [8, 32]
    assert "2 of 4 rows: 2 compile" in capsys.readouterr().out
    assert verify(tmp_path, "--chip", "v5e") == 0
    assert "0 of 0 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume"], "--resume has no meaning with --verify"),
        (["--model", "x"], "--model has no meaning with --verify"),
        (["--chip", "v7"], "--chip v7 is unknown"),
    ],
)
def test_what_verifying_does_not_take(tmp_path, capsys, words, said):
    assert verify(tmp_path, *words) == 2
    assert said in capsys.readouterr().err


def test_verifying_needs_rows_and_a_compiler(tmp_path, capsys):
    assert verify(tmp_path) == 2, "an empty folder is more likely a wrong one than one that is in order"
    assert "holds no tables" in capsys.readouterr().err
    assert run("--verify", "--output-dir", tmp_path) == 2
    assert "--verify needs --compile-only" in capsys.readouterr().err
    assert run("--compile-only", "--sample", 2, "--output-dir", tmp_path) == 2
    assert "--sample is for --verify" in capsys.readouterr().err
    assert verify(tmp_path / "nowhere") == 2
    assert "is not a folder" in capsys.readouterr().err
