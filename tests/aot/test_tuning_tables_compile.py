"""Rows of the shipped tables still compile: a sample of them; all of them by the same command without --sample."""

import pytest

from tpu_serve.cli import main as cli
from tpu_serve.tuning_tables.files import SHIPPED

pytestmark = pytest.mark.aot


@pytest.mark.parametrize(("chip", "number"), [("v5e", 2), ("v6e", 2), ("tpu7x", 2)])
def test_a_sample_of_the_shipped_rows(chip, number, capsys):
    words = ["--compile-only", "--verify", "--chip", chip, "--sample", str(number), "--output-dir", str(SHIPPED)]
    code = cli.main(["tune", "fused_moe_v2", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"{number} of " in said.out
    assert f"rows: {number} compile, 0 do not" in said.out
