"""Rows of the shipped tables still compile: a sample of them; all of them by the same command without --sample."""

import pytest

from tpu_serve.bench import fused_moe
from tpu_serve.bench.compiled.compiler import compile_here
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.cli import main as cli
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.moe_plan.layer import MoELayer, Policy
from tpu_serve.moe_plan.lookup import find
from tpu_serve.moe_plan.plan import plan_layer
from tpu_serve.moe_plan.rows import rows_of
from tpu_serve.tuning_tables.files import SHIPPED

pytestmark = pytest.mark.aot


def test_a_sample_of_the_shipped_rows(capsys):
    words = ["--compile-only", "--verify", "--sample", "3", "--output-dir", str(SHIPPED)]
    code = cli.main(["tune", "fused_moe_v2", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.out.startswith("3 of ")
    assert "rows: 3 compile, 0 do not" in said.out


@pytest.mark.parametrize(
    ("chip", "workload", "format", "num_tokens"),
    [("v6e", "Qwen3-30B-A3B", "bfloat16", 64), ("tpu7x", "Qwen3-30B-A3B", "fp8_channel", 16)],
)
def test_as_the_server_runs_them(chip, workload, format, num_tokens):
    """Rows are made for sequence parallelism; the server gives every device all tokens, and takes what is left of them."""
    known = rows_of(chip)
    layer = MoELayer.of_workload(WORKLOADS[workload], format)
    made = plan_layer(layer, num_tokens, 8, TPU_CHIPS[chip], Policy(), known)
    assert made.path == "fused"
    config = find(made.problem, TPU_CHIPS[chip], known).config
    program = compile_here(*fused_moe.layer(made.problem, config, TPU_CHIPS[chip], target_devices(topology(chip, 8))))
    assert program.error is None, program.error
