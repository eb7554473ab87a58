"""The file of `bench kernels`: written as cells are done, continued with `--resume`."""

import json

import pytest

from tpu_serve.bench import journal_file, kernel_rows
from tpu_serve.cli.main import main

FOUND = {
    "error": None,
    "kernels": {},
    "main_kernel": None,
    "modelled_us": 203.6,
    "bound_us": 102.0,
    "untimed": {},
    "temporary_bytes": 2**20,
    "compile_seconds": 12.0,
}
CHOICE = [
    *["--chip", "v6e", "--workload", "Qwen3-30B-A3B", "--format", "bfloat16", "--num-devices", "8"],
    *["--num-tokens", "16", "64", "256"],
]


class Compiler:
    """Answers for the compiler by the number of tokens; None interrupts."""

    def __init__(self, monkeypatch, **answers):
        self.asked = []
        self.answers = {int(name[1:]): answer for name, answer in answers.items()}
        monkeypatch.setattr(kernel_rows, "report", self.report)

    def report(self, target, arguments, *others, stop):
        tokens = arguments["num_tokens"]
        self.asked.append(tokens)
        answer = self.answers.get(tokens, FOUND)
        if answer is None:
            raise KeyboardInterrupt
        return answer


def run(file, *options):
    return main(["bench", "kernels", "--compiled", *CHOICE, "--output-json", str(file), *options])


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_file_says_what_it_is_and_has_a_row_a_line(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch)
    file = tmp_path / "rows.jsonl"
    file.write_text("what was there before\n" * 1000)
    assert run(file) == 0
    head, *rows = lines_of(file)
    assert "nothing here was measured on a TPU" in head["note"]
    assert set(head["versions"]) == {"jax", "libtpu", "tpu_serve"}
    assert [row["problem"]["num_tokens"] for row in rows] == [16, 64, 256]
    assert rows[0]["label"] == "Qwen3-30B-A3B-v6e-bfloat16-T16-D8"
    assert (rows[0]["kernel"], rows[0]["backend"], rows[0]["mode"]) == ("fused_moe_v2", "tc", None)
    assert rows[0]["config"]["mode"] == "D"
    assert rows[0]["report"] == FOUND
    said = capsys.readouterr()
    assert said.out.count("T16-D8") == 1
    assert "T16-D8  mode D, " in said.err
    assert said.out.index("T16-D8") < said.out.index("T64-D8") < said.out.index("T256-D8")


def test_what_is_there_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    Compiler(monkeypatch, T16=FOUND | {"error": "MosaicError: no"}, T64=FOUND | {"modelled_us": 777.0}, T256=None)
    assert run(file) == 130
    assert "2 of 3 cells are written; --resume continues" in capsys.readouterr().err
    assert [row["outcome"] for row in lines_of(file)[1:]] == ["failed", "compiled"]

    again = Compiler(monkeypatch)
    assert run(file, "--resume") == 0
    assert sorted(again.asked) == [16, 256], "the one that failed and the one that is missing"
    table = capsys.readouterr().out
    assert "3 compiled, 0 refused, 0 failed" in table
    assert "777" in table, "the row of the first run"
    assert table.index("T16-D8") < table.index("T64-D8") < table.index("T256-D8")

    never = Compiler(monkeypatch)
    assert run(file, "--resume") == 0
    assert never.asked == []
    assert len(lines_of(file)) == 1 + 4


def test_a_later_row_of_a_cell_counts(monkeypatch, tmp_path):
    file = tmp_path / "rows.jsonl"
    Compiler(monkeypatch)
    run(file)
    row = lines_of(file)[1] | {"outcome": "failed", "reason": "later"}
    with file.open("a") as opened:
        opened.write(json.dumps(row) + "\n")
    again = Compiler(monkeypatch, T16=FOUND | {"error": "still"})
    assert run(file, "--resume") == 1
    assert again.asked == [16]


def test_rows_of_another_mode_stay_and_are_not_taken(monkeypatch, tmp_path):
    file = tmp_path / "rows.jsonl"
    Compiler(monkeypatch)
    run(file)
    again = Compiler(monkeypatch)
    assert run(file, "--resume", "--mode", "G") == 0
    assert again.asked == [16, 64, 256]
    assert [row["mode"] for row in lines_of(file)[1:]] == [None] * 3 + ["G"] * 3


def test_a_line_that_was_cut_off_is_written_again(monkeypatch, tmp_path):
    file = tmp_path / "rows.jsonl"
    Compiler(monkeypatch)
    run(file)
    whole = file.read_text()
    file.write_text(whole[:-40])
    again = Compiler(monkeypatch)
    assert run(file, "--resume") == 0
    assert again.asked == [256]
    assert file.read_text() == whole


@pytest.mark.parametrize("before", [None, ""])
def test_the_first_run_may_say_resume_too(monkeypatch, tmp_path, before):
    file = tmp_path / "rows.jsonl"
    if before is not None:
        file.write_text(before)
    Compiler(monkeypatch)
    assert run(file, "--resume") == 0
    assert len(lines_of(file)) == 4


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ('{"note": "", "rows": []}\n', "It was not written by this command; name another --output-json."),
        ("a,b\n", "It was not written by this command"),
        ("[1]\n", "It was not written by this command"),
    ],
)
def test_other_files_are_not_continued(monkeypatch, tmp_path, capsys, before, words):
    file = tmp_path / "rows.jsonl"
    file.write_text(before)
    compiler = Compiler(monkeypatch)
    assert run(file, "--resume") == 2
    assert words in capsys.readouterr().err
    assert (file.read_text(), compiler.asked) == (before, [])


def test_a_wrong_line_is_named(monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    Compiler(monkeypatch)
    run(file)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], '{"label": "?"}', *lines[2:]]) + "\n")
    assert run(file, "--resume") == 2
    assert "Its line 3 is not a row; name another" in capsys.readouterr().err


def test_files_of_other_versions_are_not_continued(monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    Compiler(monkeypatch)
    now = journal_file.versions()
    monkeypatch.setattr(journal_file, "versions", lambda: now | {"libtpu": "0.0.1"})
    run(file)
    before = file.read_text()
    monkeypatch.setattr(journal_file, "versions", lambda: now)
    assert run(file, "--resume") == 2
    assert f"was written with libtpu 0.0.1 (here {now['libtpu']}); name another" in capsys.readouterr().err
    assert file.read_text() == before


def test_a_failed_cell_is_an_exit_code(monkeypatch, tmp_path, capsys):
    Compiler(monkeypatch, T64=FOUND | {"error": "MosaicError: no"})
    file = tmp_path / "rows.jsonl"
    assert run(file) == 1
    assert [row["outcome"] for row in lines_of(file)[1:]] == ["compiled", "failed", "compiled"]
    said = capsys.readouterr()
    assert "T64-D8  failed: MosaicError: no" in said.out
    assert "T64-D8  failed: MosaicError: no" in said.err
