"""`bench host`: what is measured, on a clock that counts."""

from __future__ import annotations

import itertools
import json

import pytest

from tpu_serve.bench.compare import compare
from tpu_serve.bench.host import PARTS, HostPlan, bench_host
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError

SMALL = {"num_seqs": 6, "context_len": 20, "num_steps": 12, "page_size": 4, "budget": 32, "num_runs": 2}


def ticking():
    """A clock on which every part takes a second."""
    return map(float, itertools.count()).__next__


def test_every_step_has_all_sequences_and_every_part_its_own_time() -> None:
    costs = bench_host(HostPlan(**SMALL), clock=ticking())
    assert len(costs.runs) == 2
    for run in costs.runs:
        assert run.num_rows == [6] * 12
        assert {name: set(samples) for name, samples in run.parts.items()} == {name: {1e6} for name in PARTS}
        figures = run.figures()
        assert (figures["sum_median_us"], figures["commit_p99_us"]) == (4e6, 1e6)
        assert figures["row_median_us"] == pytest.approx(4e6 / 6)


def test_who_ends_is_replaced() -> None:
    plan = HostPlan(**SMALL | {"end_percent": 10.0, "num_steps": 30, "num_runs": 1})
    (run,) = bench_host(plan, clock=ticking()).runs
    assert plan.longest_answer == 10
    assert max(run.num_rows) == 6
    assert min(run.num_rows) < 6  # a row whose last token is in flight is not launched again


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_seqs": 33}, "--num-seqs 33 is more than --max-num-batched-tokens 32"),
        ({"end_percent": 60.0}, "--end-percent must lie between 0 and 50, got 60"),
        ({"end_percent": 40.0}, "--end-percent 40 brings 54 tokens a step"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HostPlan(**SMALL | given)


def test_two_results_can_be_compared(tmp_path, capsys) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file in files:
        arguments = "--num-seqs 4 --context-len 9 --num-steps 5 --page-size 4 --max-num-batched-tokens 16 --repeat 2"
        assert main(["bench", "host", *arguments.split(), "--output-json", str(file)]) == 0
    assert "us per step" in capsys.readouterr().out
    assert json.loads(files[0].read_text())["settings"]["num_seqs"] == 4
    found = compare(*files, threshold=1e9, allows_different=False)
    assert found.num_runs == (2, 2)
    assert {row.name for row in found.rows} >= {f"{part}_median_us" for part in (*PARTS, "sum", "row")}
