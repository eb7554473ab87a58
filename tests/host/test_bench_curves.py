"""`bench report`: which curves are drawn of results, where their points lie, and the page around them."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from tpu_serve.bench.charts import (
    HEIGHT,
    LEFT,
    NUM_COLOURS,
    TOP,
    WIDTH,
    Chart,
    Curve,
    Mark,
    Point,
    linear_ticks,
    log_ticks,
)
from tpu_serve.bench.curves import crossovers, sections
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError


def serve(label, concurrency, throughput, **more):
    figures = {
        f"{kind}_{name}_ms": 10.0 * concurrency for kind in ("median", "p99") for name in ("ttft", "tpot", "e2el")
    }
    return {
        "label": label, "model_id": "m", "num_prompts": 5, "failed": 0, "request_rate": "inf", "max_concurrency": concurrency,
        "output_throughput": throughput, "request_throughput": 1.0, **figures, **more,
    }  # fmt: skip


def prefill(input_len, speed):
    return {
        "chunk": 64, "input_len": input_len, "batch_size": 2, "latency_ms": {"median": 4.0, "p99": 5.0}, "tokens_per_second": speed,
        "bound_share": 0.25,
    }  # fmt: skip


def decode(batch_size, speed):
    return {
        "input_len": 8, "output_len": 4, "batch_size": batch_size, "step_ms": {"median": 2.0, "p99": 3.0}, "tokens_per_second": speed,
    }  # fmt: skip


def moe(num_tokens, dense, ragged):
    times = {"dense": dense, "ragged": ragged, "empty": 0.1}
    return {"layer": {"name": "8x2"}, "dtype": "bfloat16", "num_tokens": num_tokens, "median_ms": times}


def compiled(num_tokens, fused_us, xla_us):
    return {
        "workload": "W", "chip": "v6e", "format": "bfloat16", "num_devices": 8, "num_tokens": num_tokens, "fused_us": fused_us,
        "xla_path": "ragged", "xla_least_us": xla_us,
    }  # fmt: skip


def points(chart):
    return {curve.name: [(point.x, point.y) for point in curve.points] for curve in chart.curves}


def only(tmp_path, *documents):
    (section,) = sections([(tmp_path / f"{place}.json", document) for place, document in enumerate(documents)])
    return section


def test_runs_of_a_label_are_a_curve_in_the_order_of_their_load(tmp_path):
    section = only(
        tmp_path, serve("new", 4, 300.0), serve("old", 1, 90.0), serve("new", 1, 100.0), serve("new", 2, 250.0)
    )
    assert points(section.charts[0]) == {"new": [(100.0, 10.0), (250.0, 20.0), (300.0, 40.0)], "old": [(90.0, 10.0)]}
    assert [point.label for point in section.charts[0].curves[0].points] == ["1 at once", "2 at once", "4 at once"]
    assert len(section.charts) == 6, "median and 99th percentile of three metrics"
    assert [row[:2] for row in section.rows] == [
        ["new", "1 at once"],
        ["new", "2 at once"],
        ["new", "4 at once"],
        ["old", "1 at once"],
    ]


def test_what_spoils_a_run_is_said_on_the_page(tmp_path):
    section = only(tmp_path, serve("a", 1, 1.0, failed=2, failures={"HTTP 503": 2}, server={"num_compiled": 3}))
    assert section.warnings == [
        "a at 1 at once: 2 requests failed (HTTP 503: 2).", "a at 1 at once: 3 programs were compiled during the run.",
    ]  # fmt: skip
    section = only(
        tmp_path, {"benchmark": "decode", "results": [decode(1, 5.0)], "warnings": ["Sequences were preempted."]}
    )
    assert section.warnings == ["0.json: Sequences were preempted."]


def test_sweeps_are_curves_over_length_and_batch(tmp_path):
    section = only(tmp_path, {"benchmark": "prefill", "results": [prefill(128, 900.0), prefill(16, 300.0)]})
    assert points(section.charts[0]) == {"batch of 2, chunks of 64": [(16.0, 300.0), (128.0, 900.0)]}
    assert section.rows[0][-1] == "25.0%"
    one, two = ({"benchmark": "decode", "results": [decode(1, speed), decode(8, 4 * speed)]} for speed in (10.0, 20.0))
    assert points(only(tmp_path, one, two).charts[0]) == {
        "0: 8 + 4 tokens": [(1.0, 10.0), (8.0, 40.0)], "1: 8 + 4 tokens": [(1.0, 20.0), (8.0, 80.0)],
    }  # fmt: skip


def test_crossovers_are_where_another_way_becomes_the_fastest(tmp_path):
    section = only(tmp_path, {"benchmark": "moe", "results": [moe(64, 9.0, 3.0), moe(1, 1.0, 2.0), moe(8, 2.0, 2.5)]})
    assert points(section.charts[0]) == {
        "dense": [(1, 1.0), (8, 2.0), (64, 9.0)],
        "ragged": [(1, 2.0), (8, 2.5), (64, 3.0)],
    }
    assert section.charts[0].marks == [Mark(64, "from 64: ragged")]
    assert crossovers([(1, {"a": 1, "b": 2}), (2, {"a": 3, "b": 2}), (4, {"a": 1, "b": 2})]) == [
        Mark(2, "from 2: b"),
        Mark(4, "from 4: a"),
    ]
    assert not any("Compiled" in note for note in section.notes)


def test_compiled_figures_say_that_they_are(tmp_path):
    results = [compiled(16, 50.0, 40.0), compiled(1024, 100.0, 200.0), compiled(4096, None, 400.0)]
    section = only(tmp_path, {"benchmark": "moe", "is_compiled": True, "results": results})
    assert points(section.charts[0]) == {
        "fused, modelled": [(16, 0.05), (1024, 0.1)], "XLA, at least": [(16, 0.04), (1024, 0.2), (4096, 0.4)],
    }  # fmt: skip
    assert section.charts[0].marks == [Mark(1024, "from 1024: fused, modelled")], (
        "no crossing where one of them is missing"
    )
    assert "Nothing here was measured on a TPU" in section.notes[0]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"benchmark": "startup"}, "a result of bench startup"),
        ({"foo": 1}, "no result of a benchmark"),
        ({"benchmark": "decode", "results": [{"batch_size": 1}]}, "lacks what its benchmark writes: KeyError"),
    ],
)
def test_what_cannot_be_drawn_is_refused(document, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        only(tmp_path, document)


def test_points_lie_where_their_values_are():
    chart = Chart(
        title="t",
        x_title="x",
        y_title="y",
        curves=[Curve("c", [Point(0, 0), Point(10, 5, "ten", "n")])],
        marks=[Mark(5, "half")],
    )
    root = ET.fromstring(chart.svg())
    circles = [(float(one.get("cx")), float(one.get("cy"))) for one in root.iter("circle")]
    line = next(one for one in root.iter("line") if one.get("class") == "mark")
    assert circles[0] == (LEFT, HEIGHT - 46)
    assert circles[1] == (WIDTH - 20, TOP)
    assert float(line.get("x1")) == pytest.approx((LEFT + WIDTH - 20) / 2)
    assert [one.text for one in root.iter("title")] == ["c", "c: n"]


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    curve = Curve("c", [Point(2, 1), Point(8, 10), Point(32, 100)])
    root = ET.fromstring(
        Chart(title="t", x_title="x", y_title="y", curves=[curve], has_log_x=True, has_log_y=True).svg()
    )
    across, up = ([float(one.get(name)) for one in root.iter("circle")] for name in ("cx", "cy"))
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.11)
    assert up[0] - up[1] == pytest.approx(up[1] - up[2], abs=0.11)


@pytest.mark.parametrize("most", [0.003, 1, 7, 10, 99, 433, 1e6])
def test_ticks_are_round_and_cover_the_values(most):
    ticks = linear_ticks(most)
    assert ticks[0] == 0
    assert ticks[-2] < most <= ticks[-1] * (1 + 1e-9)
    assert 2 <= len(ticks) <= 8
    assert log_ticks(most, most * 30)[0] <= most * (1 + 1e-9)
    assert log_ticks(most, most * 30)[-1] >= most * 30 * (1 - 1e-9)


def test_the_page_is_one_file_that_loads_nothing(tmp_path, capsys):
    names = [f"<{place}>" for place in range(NUM_COLOURS + 1)]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text("\n".join(json.dumps(serve(name, 1, 5.0)) for name in names))
    two.write_text(
        json.dumps(
            {
                "benchmark": "moe",
                "results": [moe(1, 1.0, 2.0)],
                "device": {"count": 1, "kind": "cpu", "platform": "cpu"},
            }
        )
    )
    page = tmp_path / "page.html"
    assert main(["bench", "report", str(one), str(two), "--output", str(page), "--title", "A & B"]) == 0
    text = page.read_text()
    assert "<h1>A &amp; B</h1>" in text
    assert "<title>A &amp; B</title>" in text
    assert "&lt;8&gt;" in text
    assert "<8>" not in text
    assert 'class="dashed"' in text, "the ninth curve has the first one's colour"
    assert "on 1 x cpu (platform cpu)" in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
    assert text.count("<svg") == 7
    assert main(["bench", "report", str(one), "--output", "no/such/folder/x.html"]) == 2
    assert "cannot be written" in capsys.readouterr().err
