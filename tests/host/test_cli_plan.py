"""`tpu-serve plan`: what it prints, as a table and as JSON, what it refuses, and how it ends."""

import json

import pytest
from cases import FIXTURES

from tpu_serve.cli import main as cli
from tpu_serve.moe_plan.key import BUCKETS


def run(capsys, *words):
    code = cli.main(["plan", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_known_layer(capsys):
    code, out, err = run(capsys, "Qwen3-30B-A3B", "--chip", "v6e", "--ep", 8)
    assert (code, err) == (0, "")
    title, header, *lines = out.splitlines()
    assert title == "Qwen3-30B-A3B: 8 of 128 experts, hidden 2048, intermediate 768, bfloat16, on 8 x v6e"
    assert header.split()[:3] == ["tokens", "path", "tiles"]
    assert [int(line.split()[0]) for line in lines[: len(BUCKETS)]] == list(BUCKETS)
    assert lines[0].split()[1:3] == ["fused", "D"]


def test_as_json_and_nothing_else(capsys):
    code, out, _ = run(
        capsys, "Qwen3-30B-A3B", "--chip", "tpu7x", "--format", "fp8_channel", "--num-tokens", 600, 64, "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert (found["chip"], found["num_devices"], found["layer"]["format"]) == ("tpu7x", 8, "fp8_channel")
    assert [plan["num_tokens"] for plan in found["plans"]] == [64, 600]
    at_64, at_600 = found["plans"]
    assert (at_64["path"], at_64["config"]["mode"], at_64["bound_us"] > 0) == ("fused", "D", True)
    assert "XLA would widen all experts from float8_e4m3fn to bfloat16" in at_600["reason"]
    code, out, _ = run(capsys, "Qwen3-30B-A3B", "--chip", "tpu7x", "--num-tokens", 300, "--json")
    assert json.loads(out)["plans"][0]["refusals"][0]["path"] == "fused"


def test_it_reads_what_the_server_reads(capsys, tmp_path, monkeypatch):
    """The folder in which a server keeps what it measured, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "tpu-serve" / "tuning_tables"
    folder.mkdir(parents=True)
    (folder / "v6e").mkdir()
    (folder / "v6e" / "fused_moe_v2.json").write_text("{")
    code, _, err = run(capsys, "Qwen3-30B-A3B", "--chip", "v6e")
    assert code == 2
    assert f"The tuning table {folder}/v6e/fused_moe_v2.json is damaged" in err


def test_a_model_folder(capsys):
    code, out, _ = run(capsys, FIXTURES / "qwen3_moe", "--chip", "v5e", "--ep", 4, "--num-tokens", 64)
    config = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())
    assert code == 0
    assert f"{config['num_experts_per_tok']} of {config['num_experts']} experts, hidden {config['hidden_size']}" in out


def test_a_quantised_checkpoint_must_say_how(capsys, tmp_path):
    config = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "the checkpoint is quantised; name the weights' format with --format" in err
    assert run(capsys, tmp_path, "--format", "int8_channel", "--num-tokens", 8)[0] == 0


def test_the_embedded_model_on_a_cpu(capsys):
    code, out, _ = run(capsys, "--chip", "cpu")
    assert code == 0
    assert "on 1 x cpu" in out
    assert "not fused: on a CPU the kernel is only simulated" in out


def test_tiles_are_refused_before_anything_is_planned(capsys):
    code, _, err = run(capsys, "Qwen3-30B-A3B", "--moe-tiles", '{"mode": "D"}')
    assert code == 2
    assert "--moe-tiles lacks the field 'tile_columns' of mode D" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chip", "v6"], "--chip v6 is unknown; known are v5e, v5p, v6e, tpu7x, cpu. Did you mean v6e?"),
        (["--format", "fp9"], "--format fp9 is unknown; known are float32, bfloat16"),
        (["--ep", "0"], "'0' is not a positive integer"),
        (["--num-tokens", "1" + "0" * 400], "--num-tokens must be less than 2147483648"),
        (["--moe-tuning-dir", "~nosuchuser/x"], "--moe-tuning-dir: "),
        (["--num-tokens", "x"], "'x' is not a positive integer"),
        (["--dispatch-dtype", "int8"], "--dispatch-dtype needs --sequence-parallel"),
        (["--moe-tuning-dir", "/nowhere"], "--moe-tuning-dir /nowhere is not a folder"),
        (["--moe-backend", "fused", "--format", "fp8_channel"], "--moe-backend fused cannot run this model: for 8 tokens format"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(capsys, words, said):
    code, out, err = run(capsys, "Qwen3-30B-A3B", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_coverage_lists_what_has_no_row(capsys):
    code, out, _ = run(capsys, "--coverage", "--chip", "v6e", "--num-tokens", 8, 4096)
    *lines, total = out.splitlines()
    assert code == 0
    numbers = [int(word) for word in total.split() if word.isdecimal()]
    assert numbers[1] == 6 * 3 * 3 * 2 - 2 * 3 * 2, (
        "six layers, three formats (one layer has one), three sizes, two counts"
    )
    code, out, _ = run(capsys, "--coverage", "--chip", "v6e", "--num-tokens", 8, 4096, "--json")
    found = json.loads(out)
    assert sum(one["num_wanted"] - len(one["missing"]) for one in found) == numbers[0]
    assert len(lines) == sum(bool(one["missing"]) for one in found)
    layer = ["Qwen3-30B-A3B", "--chip", "v6e", "--num-tokens", 24]  # no bucket, so without a row of its own
    assert run(capsys, *layer, "--coverage", "--moe-strict-tables")[0] == 1
    assert run(capsys, *layer, "--moe-strict-tables")[0] == 1
    assert run(capsys, *layer)[0] == 0
