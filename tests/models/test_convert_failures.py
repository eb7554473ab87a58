"""A conversion that cannot work says why and leaves nothing behind; the command says it in one line."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from cases import FIXTURES
from expert_checkpoints import LAYER, contents, convert, experts, nothing_but, write

from tpu_serve.checkpoint.layouts import FUSED, LAYOUTS, SPLIT
from tpu_serve.cli import main as cli
from tpu_serve.config import ConfigError

FUSED_NAMES = {"gate": f"{LAYER}.gate_up_proj", "down": f"{LAYER}.down_proj"}
BROKEN = {
    "odd experts": (experts(count=3), r"3 is an odd number of them"),
    "odd hidden": (experts(hidden=5), r"size 5 is odd"),
    "no experts": ({"x.weight": np.ones(3)}, "no routed experts"),
    "a gap": (
        {name: array for name, array in experts().items() if ".2.up" not in name},
        r"has no model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight",
    ),
    "another type": (
        experts() | {f"{LAYER}.1.up_proj.weight": np.ones((2, 6), np.float16)},
        r"1\.up_proj\.weight in .* is float16\[2, 6\], but .* is float32\[2, 6\]",
    ),
    "another shape": (experts() | {f"{LAYER}.0.down_proj.weight": np.ones((2, 6), np.float32)}, r"1\.down_proj"),
    "not transposed": (
        {name: array.T if "down" in name else array for name, array in experts().items()},
        r"are not \[I, H\] and \[H, I\]",
    ),
    "two layouts": (experts() | {f"{LAYER}.wi": np.ones((4, 6, 4)), f"{LAYER}.wo": np.ones((4, 2, 6))}, "two layouts"),
    "two layouts in the other order": (
        {f"{LAYER}.wi": np.ones((4, 6, 4)), f"{LAYER}.wo": np.ones((4, 2, 6))} | experts(),
        "two layouts",
    ),
    "two fused layouts": (
        {f"{LAYER}.wi": np.ones((4, 6, 4)), f"{LAYER}.wo": np.ones((4, 2, 6))}
        | {FUSED_NAMES["gate"]: np.ones((4, 4, 6)), FUSED_NAMES["down"]: np.ones((4, 6, 2))},
        "two layouts",
    ),
    "no wo": ({f"{LAYER}.wi": np.ones((4, 6, 4))}, r"has .*experts\.wi, but no .*experts\.wo"),
    "shapes apart": ({f"{LAYER}.wi": np.ones((4, 6, 4)), f"{LAYER}.wo": np.ones((4, 3, 6))}, "not of the same experts"),
    "interleaved": (
        {FUSED_NAMES["gate"]: np.ones((4, 6, 4)), FUSED_NAMES["down"]: np.ones((4, 2, 6))},
        "this form is not known",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_converted_is_refused_before_anything_is_written(case, tmp_path):
    tensors, words = BROKEN[case]
    source = write(tmp_path / "source", tensors)
    with pytest.raises(ConfigError, match=words):
        convert(source, tmp_path / "copy", SPLIT)
    assert nothing_but(tmp_path, "source")


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", experts(count=8, hidden=64, inner=32))


def test_a_source_that_breaks_off_under_way(source, tmp_path):
    def cut(done, total):
        weights = source / "model.safetensors"
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size - 100)

    with pytest.raises(ConfigError, match=r"weight in .*model\.safetensors cannot be read: the file ends before it"):
        convert(source, tmp_path / "copy", SPLIT, progress=cut)
    assert nothing_but(tmp_path, "source")


@contextmanager
def largest_file(num_bytes):
    """A disk that is full: writing beyond a size fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_under_way(source, tmp_path):
    target = convert_and_mark(source, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"copy cannot be written: File too large\."), largest_file(100_000):
        convert(source, target, SPLIT, overwrite=True)
    assert nothing_but(tmp_path, "source", "copy")
    assert (target / "mark.txt").exists()


def test_a_disk_that_says_only_at_the_end_that_it_is_full(source, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match=r"copy cannot be written: No space left on device\."):
        convert(source, tmp_path / "copy", SPLIT)
    assert nothing_but(tmp_path, "source")


def test_two_tensors_of_one_name_are_refused(tmp_path):
    gates = {f"model.layers.0.{block}.gate.weight": np.ones((4, 6)) for block in ("mlp", "block_sparse_moe")}
    source = write(tmp_path / "source", experts() | gates, model_type="mixtral")
    with pytest.raises(ConfigError, match=r"would become model\.layers\.0\.block_sparse_moe\.gate\.weight"):
        convert(source, tmp_path / "copy", SPLIT)
    assert nothing_but(tmp_path, "source")


def test_a_disk_that_is_too_small_is_known_before(source, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ConfigError, match=r"copy needs 196,608 bytes, but only 100 are free in"):
        convert(source, tmp_path / "copy", SPLIT)
    assert nothing_but(tmp_path, "source")


def test_an_interruption_leaves_nothing(source, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "copy", SPLIT, progress=interrupt)
    assert nothing_but(tmp_path, "source")


def test_the_folder_has_its_name_only_when_it_is_complete(source, tmp_path):
    seen = []

    def look(done, total):
        seen.extend(path for path in tmp_path.iterdir() if path.name != "source")
        assert not (tmp_path / "copy").exists()
        assert not any((path / "config.json").exists() for path in seen)

    convert(source, tmp_path / "copy", SPLIT, progress=look)
    assert {path.suffix for path in seen} == {".partial"}
    assert nothing_but(tmp_path, "source", "copy")


def test_config_json_is_the_last_file(source, tmp_path, monkeypatch):
    """A folder that a killed process leaves behind is no model folder."""
    (source / "tokenizer.json").touch()
    (source / "a.json").touch()
    names, copy = [], shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda one, other: names.append(one.name) or copy(one, other))
    convert(source, tmp_path / "copy", SPLIT)
    assert names == ["a.json", "tokenizer.json", "config.json"]


def convert_and_mark(source, target):
    convert(source, target, FUSED)
    (target / "mark.txt").touch()
    return target


def test_overwrite_replaces_a_model_folder_only(source, tmp_path):
    target = convert_and_mark(source, tmp_path / "copy")
    with pytest.raises(ConfigError, match="copy is not empty; --overwrite replaces it"):
        convert(source, target, SPLIT)
    assert (target / "mark.txt").exists()
    convert(source, target, SPLIT, overwrite=True)
    assert not (target / "mark.txt").exists()
    assert len(contents(target)[f"{LAYER}.wi"][1]) == 4
    assert nothing_but(tmp_path, "source", "copy")
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").touch()
    with pytest.raises(ConfigError, match="is no model folder"):
        convert(source, home, SPLIT, overwrite=True)
    assert nothing_but(home, "precious")


def test_a_link_stays_a_link_to_what_is_replaced(source, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    convert(source, tmp_path / "link", SPLIT)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "config.json").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda source: source, "is both the source and the target"),
        (lambda source: source / ".." / source.name, "is both the source and the target"),
        (lambda source: source.parent, "holds the source"),
        (lambda source: source / "config.json", "is a file"),
        (lambda source: source.parent / "no" / "copy", "there is no folder"),
    ],
)
def test_targets_that_are_none(source, make, words):
    with pytest.raises(ConfigError, match=words):
        convert(source, make(source), SPLIT, overwrite=True)
    assert nothing_but(source, "config.json", "model.safetensors")


def test_the_command(source, tmp_path, capsys):
    words = ["convert", str(source), str(tmp_path / "copy"), "--moe-layout", "split", "--max-shard-size", "0.1m"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(
        f"wrote {tmp_path / 'copy'}: 1 groups of routed experts in the split layout, 192kB in 2 files"
    )
    assert not shown.err  # no bar: this is no terminal
    assert len(list((tmp_path / "copy").glob("model-*.safetensors"))) == 2
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.err == f"tpu-serve: error: {tmp_path / 'copy'} is not empty; --overwrite replaces it.\n"
    assert cli.main([*words, "--overwrite"]) == 0
    scale = {f"{LAYER}.0.gate_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    write(source, experts() | scale)
    capsys.readouterr()
    assert cli.main([*words, "--overwrite"]) == 0
    assert f"1 other tensors of experts are copied as they are, such as {LAYER}.0.gate_proj" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["source", "copy"], "required: --moe-layout"),
        (["source", "--moe-layout", "split"], "required: DST"),
        (["source", "copy", "--moe-layout", "slpit"], "invalid choice: 'slpit'"),
        (["source", "copy", "--moe-layout", "split", "--max-shard-size", "0"], "'0' is no size"),
        (["source", "copy", "--moe-layout", "split", "--max-shard-size", "5x"], "'5x' is not a number such as"),
        (["nowhere/x/y", "copy", "--moe-layout", "split"], "There is no folder 'nowhere/x/y'"),
    ],
)
def test_errors_of_the_command_are_one_line(words, message, source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", *words]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("tpu-serve: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert nothing_but(tmp_path, "source")


def test_help(capsys):
    assert cli.main(["convert", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in (*LAYOUTS, "--moe-layout", "--max-shard-size SIZE", "(default: 5g)", "--overwrite", "[2, E, H/2, 2I]"):
        assert word in shown


@pytest.mark.parametrize("name", ["qwen3_moe_fp8", "gpt_oss_mxfp4"])
def test_quantised_experts_are_left_alone(name, tmp_path):
    """Their scales would stay behind under the old names."""
    with pytest.raises(
        ConfigError, match=r"is quantised \(quant_method \w+\)\. Only unquantised experts are converted"
    ):
        convert(FIXTURES / name, tmp_path / "target", FUSED)
    assert nothing_but(tmp_path)
