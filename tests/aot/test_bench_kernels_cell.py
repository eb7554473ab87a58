"""One cell of `bench kernels --compiled`, from the command line to the table: what is exact in it is asserted."""

import json

import pytest

from tpu_serve.cli.main import main
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS

pytestmark = pytest.mark.aot


def test_bytes_of_a_small_step(tmp_path, capsys):
    file = tmp_path / "table.json"
    cell = [
        "--chip",
        "v6e",
        "--workload",
        "Qwen3-30B-A3B",
        "--format",
        "bfloat16",
        "--num-tokens",
        "64",
        "--num-devices",
        "8",
    ]
    assert main(["bench", "kernels", "--compiled", *cell, "--output-json", str(file)]) == 0
    assert "1 compiled, 0 refused, 0 failed" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    found = row["report"]["kernels"][row["report"]["main_kernel"]]
    model = WORKLOADS["Qwen3-30B-A3B"]
    # All 16 local experts are read once; own tokens and partial sums go to 7 peers, 8 of each to every one.
    weights = 16 * 3 * model.hidden * model.intermediate * 2
    assert found["hbm_bytes"] == pytest.approx(weights, rel=0.01)
    assert found["ici_bytes"] == 2 * 7 * 8 * model.hidden * 2
    assert found["failed_checks"] == {}
    assert found["assumed"] == {}
    assert found["unanswered_waits"] == 0
    assert row["report"]["temporary_bytes"] < 2**20
