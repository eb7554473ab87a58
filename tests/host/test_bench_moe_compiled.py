"""`bench moe --compiled`: the row of a layer from what the compiler said, the least of XLA's way, and which options go together."""

import pytest

from tpu_serve.bench import kernels
from tpu_serve.bench.kernel_rows import Row
from tpu_serve.bench.moe_compiled import compiled_rows, text, xla_least
from tpu_serve.cli.main import main
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.moe_plan.traffic import xla_traffic


def cells():
    return kernels.check(
        kernels.Selection(
            chips=("v6e",), workloads=("Qwen3-30B-A3B",), formats=("bfloat16",), tokens=(16, 1024), device_counts=(8,)
        )
    )


def test_rows_have_both_ways_beside_each_other():
    answers = iter([("compiled", "", {"modelled_us": 500.0, "bound_us": 30.0}), ("failed", "out of memory", {})])
    told = []

    def run(cell):
        outcome, reason, found = next(answers)
        return Row(cell, None, outcome, reason, {}, found)

    first, second = rows = compiled_rows(cells(), run, lambda: told.append(1))
    assert told == [1, 1]
    assert (first.num_tokens, first.fused_us, first.bound_us, first.num_devices) == (16, 500.0, 30.0, 8)
    assert first.ratio == pytest.approx(500.0 / first.xla_least_us)
    assert (second.fused_us, second.ratio, second.reason) == (None, None, "out of memory")
    assert first.as_json()["ratio"] == first.ratio
    shown = text(rows)
    assert "Nothing here was measured on a TPU" in shown
    assert "out of memory" in shown
    assert f"{first.ratio:.2f}" in shown


@pytest.mark.parametrize("place", [0, 1])
def test_the_least_of_xla_is_that_of_its_bytes_at_published_rates(place):
    problem = cells()[place].case.problem
    expected = {}
    for path in ("dense", "ragged"):
        moved = xla_traffic(problem, path)
        expected[path] = (
            max(moved.hbm_bytes / 1.64e12, moved.ici_bytes / 2e11) * 1e6
        )  # a corner of 2 x 4 chips has two links
    path, least_us = xla_least(problem, TPU_CHIPS["v6e"])
    assert least_us == pytest.approx(min(expected.values()))
    assert expected[path] == pytest.approx(least_us)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chip", "v6e"], "--chip needs --compiled"),
        (["--num-devices", "8"], "--num-devices needs --compiled"),
        (["--compiled", "--padding", "5"], "--padding is about this CPU"),
        (["--compiled", "--num-iters", "5"], "--num-iters is about this CPU"),
        (["--compiled", "--workload", "tiny-chat"], "--workload tiny-chat is unknown"),
    ],
)
def test_options_of_the_other_kind_are_refused(words, message, capsys):
    assert main(["bench", "moe", *words]) == 2
    assert message in capsys.readouterr().err
