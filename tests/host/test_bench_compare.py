"""Verdicts of `bench compare`."""

import json

import pytest

from tpu_serve.bench.compare import compare
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError

SHAPE = {"backend": "openai", "num_prompts": 10, "request_rate": "inf", "settings": {"dataset": "random", "seed": 1}}


@pytest.fixture
def write(tmp_path):
    names = iter("abcdefgh")

    def write(*documents):
        path = tmp_path / next(names)
        path.write_text("\n".join(map(json.dumps, documents)))
        return path

    return write


def runs(throughputs, ttfts, **more):
    figures = [{"output_throughput": one, "mean_ttft_ms": two} for one, two in zip(throughputs, ttfts, strict=True)]
    return {**SHAPE, **figures[0], "repeats": figures, **more}


def verdicts(before, after, threshold=0.05):
    found = compare(before, after, threshold, allows_different=False)
    return {row.name: row.verdict for row in found.rows}, found


def test_more_throughput_is_better_and_more_latency_worse(write):
    said, found = verdicts(write(runs([100, 101], [10, 10])), write(runs([120, 121], [12, 12])))
    assert said == {"output_throughput": "better", "mean_ttft_ms": "worse"}
    assert {row.name: row.ratio for row in found.rows} == {
        "output_throughput": pytest.approx(120.5 / 100.5), "mean_ttft_ms": pytest.approx(1.2),
    }  # fmt: skip
    assert found.num_worse == 1
    assert "Verdict: 1 better, 1 worse, 0 the same" in found.text()
    assert "WARNING" not in found.text()


def test_what_varies_as_much_is_the_same(write):
    said, found = verdicts(write(runs([100, 140], [10, 10])), write(runs([110, 150], [10.4, 10.4])))
    assert said == {"output_throughput": "same", "mean_ttft_ms": "same"}
    noise = {row.name: row.noise for row in found.rows}
    assert noise["output_throughput"] == pytest.approx(20 / 120 + 20 / 130)
    assert noise["mean_ttft_ms"] == 0.05


def test_ranges_that_overlap_are_the_same(write):
    said, _ = verdicts(write(runs([100, 100, 130], [1, 1, 1])), write(runs([129, 150, 150], [1, 1, 1])), 0.01)
    assert said["output_throughput"] == "same"


def test_one_run_has_the_threshold_only_and_says_so(write):
    one, other = ({**SHAPE, "output_throughput": value, "request_throughput": value} for value in (100.0, 104.0))
    said, found = verdicts(write(one), write(other))
    assert set(said.values()) == {"same"}
    assert "WARNING: with one run" in found.text()
    assert set(verdicts(write(one), write(other), 0.03)[0].values()) == {"better"}


def test_several_results_in_a_file_are_runs(write):
    one, two = ({**SHAPE, "mean_itl_ms": value} for value in (1.0, 1.2))
    _, found = verdicts(write(one, two, one), write(two))
    assert found.num_runs == (3, 1)
    assert found.rows[0].before == 1.0


def test_other_shapes_are_refused_unless_told(write, capsys):
    before, after = write(runs([1, 1], [1, 1])), write(runs([1, 1], [1, 1], num_prompts=20, settings={"dataset": "x"}))
    with pytest.raises(
        ConfigError, match="num_prompts is 10 before and 20 after; dataset is 'random' before and 'x' after"
    ):
        compare(before, after, 0.05, allows_different=False)
    assert main(["bench", "compare", str(before), str(after)]) == 2
    capsys.readouterr()
    assert main(["bench", "compare", str(before), str(after), "--allow-different"]) == 0
    assert "WARNING: not the same shape: num_prompts is 10" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds results of different shapes"):
        compare(write(runs([1], [1]), runs([1], [1], num_prompts=3)), after, 0.05, allows_different=True)


def test_another_seed_is_the_same_shape(write):
    assert verdicts(write(runs([1], [1])), write(runs([1], [1], settings={"dataset": "random", "seed": 9})))[1].rows


def test_exit_codes(write, capsys):
    before, worse = write(runs([100, 100], [1, 1])), write(runs([50, 50], [1, 1]))
    assert main(["bench", "compare", str(before), str(worse)]) == 0
    assert main(["bench", "compare", str(before), str(worse), "--fail-if-worse"]) == 1
    assert main(["bench", "compare", str(worse), str(before), "--fail-if-worse"]) == 0
    assert main(["bench", "compare", str(before), str(worse), "--fail-if-worse", "--threshold", "60"]) == 0
    assert "output_throughput" in capsys.readouterr().out


def test_other_benchmarks(write):
    latency = {
        "benchmark": "latency",
        "avg_latency": 2.0,
        "latencies": [2.0],
        "percentiles": {"50": 2.0},
        "step_ms": {"median": 3.0},
    }
    said, _ = verdicts(write(latency), write({**latency, "avg_latency": 1.0}))
    assert said == {"avg_latency": "better", "p50_latency": "same", "step_ms_median": "same"}
    start = {
        "benchmark": "startup",
        "model_id": "m",
        "cold_phases": [{"ready": 9.0}],
        "warm_phases": [{"ready": 2.0}, {"ready": 2.1}],
    }
    said, found = verdicts(write(start), write({**start, "warm_phases": [{"ready": 4.0}, {"ready": 4.1}]}))
    assert said == {"cold_ready_seconds": "same", "warm_ready_seconds": "worse"}
    assert found.num_runs == (2, 2)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"benchmark": "decode", "results": []}'])
def test_files_that_are_no_results(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        compare(path, path, 0.05, allows_different=False)
    with pytest.raises(ConfigError, match="cannot be read"):
        compare(tmp_path / "none", path, 0.05, allows_different=False)


def sweep(kind, speed, **settings):
    """A result of a sweep whose times are `speed` times as large as those of 1."""
    case = {"batch_size": 2, "input_len": 8}
    if kind == "prefill":
        case |= {"chunk": 64, "samples_ms": [10.0 * speed, 11.0 * speed]}
    elif kind == "decode":
        steps = [speed, 2 * speed, 3 * speed, 5 * speed, 6 * speed, 7 * speed]
        case["samples"] = {"prefill_ms": [4.0, 4.0], "latency_ms": [20.0 * speed, 22.0 * speed], "step_ms": steps}
    else:
        case = {
            "layer": {"name": "8x2"},
            "dtype": "float32",
            "num_tokens": 4,
            "samples_ms": {"dense": [speed, speed], "ragged": [2.0, 2.0]},
        }
    return {"benchmark": kind, "settings": settings, "results": [case]}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("prefill", {"2x8 /64 latency_ms": "worse"}),
        ("decode", {"2x8 prefill_ms": "same", "2x8 latency_ms": "worse", "2x8 step_ms": "same"}),
        ("moe", {"8x2 float32 4 dense_ms": "worse", "8x2 float32 4 ragged_ms": "same"}),
    ],
)
def test_iterations_of_a_sweep_are_runs(write, kind, expected):
    said, found = verdicts(write(sweep(kind, 1.0, num_iters=2)), write(sweep(kind, 2.0, num_iters=3)))
    assert said == expected
    assert found.num_runs == (2, 2)
    if kind == "decode":
        assert {row.name: row.before for row in found.rows}["2x8 step_ms"] == (2 + 6) / 2, (
            "the median step of each iteration"
        )


def test_compiled_layers_are_compared_by_their_modelled_times(write):
    def document(fused_us):
        row = {
            "workload": "W",
            "format": "bfloat16",
            "chip": "v6e",
            "num_tokens": 16,
            "fused_us": fused_us,
            "xla_least_us": 5.0,
        }
        return {"benchmark": "moe", "is_compiled": True, "results": [row]}

    said, _ = verdicts(write(document(10.0)), write(document(8.0)))
    assert said == {"W bfloat16 v6e 16 fused_us": "better", "W bfloat16 v6e 16 xla_least_us": "same"}
