"""What `tpu-serve batch` checks before it builds an engine."""

import pytest

from tpu_serve.cli.main import main


def fails(capsys, *words):
    assert main(["batch", *map(str, words)]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return shown


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    from tpu_serve.engine import build

    def refuse(*_):
        raise AssertionError("nothing should be built")

    monkeypatch.setattr(build, "build_engine", refuse)


def test_an_input_that_cannot_be_read(tmp_path, capsys):
    assert "cannot be read: No such file" in fails(capsys, "-i", tmp_path / "none", "-o", tmp_path / "out")
    assert "cannot be read: Is a directory" in fails(capsys, "-i", tmp_path, "-o", tmp_path / "out")


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "in").write_text("")
    assert "cannot be written: No such file" in fails(capsys, "-i", tmp_path / "in", "-o", tmp_path / "none" / "out")
    assert "cannot be written: Is a directory" in fails(capsys, "-i", tmp_path / "in", "-o", tmp_path)


def test_one_file_for_both(tmp_path, capsys):
    (tmp_path / "in").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for output in ("in", "link"):
        assert "both the input and the output" in fails(capsys, "-i", tmp_path / "in", "-o", tmp_path / output)
    assert (tmp_path / "in").read_text() == "precious"


def test_standard_output_cannot_be_resumed(tmp_path, capsys):
    (tmp_path / "in").write_text("")
    assert "--resume needs an output file" in fails(capsys, "-i", tmp_path / "in", "-o", "-", "--resume")


def test_options_are_checked_before_files(capsys):
    assert "--num-pages must be at least 2" in fails(capsys, "-i", "none", "-o", "none", "--num-pages", "1")
