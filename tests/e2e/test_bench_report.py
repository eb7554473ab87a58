"""The figures of a benchmark against numpy, and what its report says about where they come from."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_serve.bench.decode import COLUMNS as DECODE_COLUMNS
from tpu_serve.bench.prefill import COLUMNS as PREFILL_COLUMNS
from tpu_serve.bench.report import Environment, Report, percentile, summary, table
from tpu_serve.config import EngineConfig
from tpu_serve.engine.intake import ModelInfo

INFO = ModelInfo(
    name="folder", architecture="Some", max_model_len=64, vocab_size=10, eos_token_ids=frozenset(), num_params=5
)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpy_s(samples, percent):
    assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_a_summary_is_numpy_s(samples):
    expected = {
        "min": np.min(samples),
        "median": np.median(samples),
        "mean": np.mean(samples),
        "p99": np.percentile(samples, 99),
    }
    assert summary(samples) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_no_samples_have_no_percentile():
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_a_table_is_aligned_to_the_right():
    assert table(["a", "long"], [["100", "1"], ["2", "20"]]) == "  a  long\n---  ----\n100     1\n  2    20"


def make_report(**changes):
    values = {
        "benchmark": "prefill",
        "settings": {"seed": 0},
        "environment": Environment.of(jax.devices()[:1]),
        "config": EngineConfig(),
        "info": INFO,
        "num_compiles_before": 3,
        "num_compiles_during": 0,
        "results": [{"input_len": 8, "latency_ms": {"median": 1.25}, "samples_ms": [1.25]}],
        "columns": {"input len": "input_len", "median ms": "latency_ms.median"},
        "bound": {"rates": "measured"},
        "bound_note": "measured rates of 5.0 GB/s",
    }
    return Report(**{**values, **changes})


def test_the_text_says_where_it_was_measured():
    text = make_report().text()
    assert "bench prefill: folder on 1 x cpu (platform cpu, chip cpu)" in text
    assert "TPU" not in text, "figures of a CPU must not pass for those of a TPU"
    assert "input len  median ms" in text
    assert "1.250" in text
    assert "compiled programs: 3 before, 0 while measuring" in text
    assert "WARNING" not in text
    assert "of bound: the least time, calculated from bytes and products at measured rates of 5.0 GB/s" in text


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"num_compiles_during": 2}, "2 programs were compiled while measuring"),
        ({"results": [{"input_len": 8, "latency_ms": {"median": 1.0}, "num_preemptions": 1}]}, "preempted"),
    ],
)
def test_what_spoils_the_figures_is_said(changes, warning):
    report = make_report(**changes)
    assert f"WARNING: {report.warnings()[0]}" in report.text()
    assert warning in report.warnings()[0]
    assert report.document()["warnings"] == report.warnings()


def test_the_document_has_everything(tmp_path):
    report = make_report()
    report.write(tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert set(document["versions"]) == {"tpu_serve", "jax", "jaxlib", "numpy", "python"}
    assert document["versions"]["jax"] == jax.__version__
    assert document["device"] == {"platform": "cpu", "kind": "cpu", "count": 1, "chip": "cpu"}
    assert document["model"]["num_params"] == 5
    assert document["engine_options"]["dtype"] == "auto"
    assert document["bound"] == {"rates": "measured"}
    assert document["compiles"] == {"before": 3, "during": 0}
    assert document["results"] == report.results
    assert document["date"].endswith("+00:00")


@pytest.mark.parametrize("columns", [PREFILL_COLUMNS, DECODE_COLUMNS])
def test_headings_are_short(columns):
    assert sum(len(heading) + 2 for heading in columns) <= 100
