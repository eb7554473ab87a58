"""One cell of `bench kernels --compiled`, from the command line to the table: what is exact in it is asserted. And what can be said of
programs that have no kernel but XLA's own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.bench.compiled.program import Program
from tpu_serve.bench.compiled.report import report
from tpu_serve.cli.main import main
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS

pytestmark = pytest.mark.aot


def test_bytes_of_a_small_step(tmp_path, capsys):
    file = tmp_path / "table.jsonl"
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
    head, row = map(json.loads, file.read_text().splitlines())
    assert head["versions"]["libtpu"] is not None
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
    assert row["report"]["untimed"].keys() <= {"collectives", "copies"}


ROWS, COLUMNS, PICKED = 8192, 2048, 4096


def picked(devices):
    """A target: rows of a table by their numbers."""
    sharding = NamedSharding(Mesh(np.array(devices), ("only",)), PartitionSpec())
    table = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, sharding=sharding)
    numbers = jax.ShapeDtypeStruct((PICKED,), jnp.int32, sharding=sharding)
    return Program(lambda table, numbers: table[numbers], [table, numbers])


def test_xlas_gather_where_the_table_is_copied_beside_it():
    found = report(f"{__name__}:picked", {}, "v6e", 1, timeout_s=240)
    rate = 1.64e12
    assert found["copied_bytes"] == ROWS * COLUMNS * 2, "the table fits VMEM"
    assert found["untimed"] == {"copies": pytest.approx(found["copied_bytes"] / rate * 1e6, abs=1e-3)}
    gather = found["kernels"]["gather_fusion"]
    assert gather["hbm_bytes"] == PICKED * COLUMNS * 2, "the result"
    assert not gather["depends_on_unknown"], "which rows they are does not matter"


def test_xlas_gather_where_the_sparse_core_does_it():
    found = report(f"{__name__}:picked", {}, "tpu7x", 1, timeout_s=240)
    assert set(found["untimed"]) == {"sparse core"}
