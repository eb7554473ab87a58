"""`tpu-serve compile` for TPUs: a program with kernels has the same name wherever it is made, and is there the next time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.aot

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "fixtures" / "qwen3_moe"
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "moe_intermediate_size": 128,
    "dtype": "bfloat16",
}


def compile_programs(code, seed, out, *words):
    command = [
        sys.executable,
        "-m",
        "tpu_serve.cli.main",
        "compile",
        str(MODEL),
        "--load-format",
        "dummy",
        "--out",
        str(out),
    ]
    command += ["--hf-overrides", json.dumps(SIZES), "--max-num-seqs", "8", "--token-buckets", "8", *words]
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)


def test_kernels_carry_no_place_into_the_names_of_programs(tmp_path):
    elsewhere, out = tmp_path / "else" / "where", tmp_path / "out"
    shutil.copytree(ROOT / "tpu_serve", elsewhere / "tpu_serve", ignore=shutil.ignore_patterns("__pycache__"))
    words = [
        "--topology",
        "v6e:1x2",
        "--tensor-parallel-size",
        "2",
        "--moe-backend",
        "fused",
        "--attention-backend",
        "kernel",
    ]
    told = []
    for code, seed in ((ROOT, "1"), (elsewhere, "2")):
        done = compile_programs(code, seed, out, *words, "--json")
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout)["programs"])
    assert {one["name"] for one in told[0]} >= {"step of 8 tokens", "write counts", "fresh state"}
    assert [one["was_there"] for one in told[0]] == [False] * len(told[0])
    assert [one["was_there"] for one in told[1]] == [True] * len(told[0])
    assert all(isinstance(one["temporary_bytes"], int) for one in told[0])
    assert len(list((out / "programs").iterdir())) == len(told[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "v6e:3x3"], "--topology: there is no topology 'v6e:3x3'; there are v6e:1x1, v6e:1x2"),
        (["--topology", "v6"], "and cpu."),
        (
            ["--topology", "v6e:2x2", "--tensor-parallel-size", "8"],
            "--tensor-parallel-size 8 is more than the 4 tpu devices",
        ),
        (["--topology", "cpu", "--warm-up-measure"], "nothing can be compiled before"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_a_line(tmp_path, words, message):
    done = compile_programs(ROOT, "0", tmp_path, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
