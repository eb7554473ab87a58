"""What the figures of `bench serve` mean, on timelines worked out by hand."""

import math

import numpy as np
import pytest

from tpu_serve.bench.serving.arrivals import Arrivals
from tpu_serve.bench.serving.block import block
from tpu_serve.bench.serving.events import EventReader
from tpu_serve.bench.serving.figures import figures, read_objectives
from tpu_serve.bench.serving.load import Load
from tpu_serve.bench.serving.outcome import AnswerReader, Outcome
from tpu_serve.bench.serving.server_metrics import Snapshot, between
from tpu_serve.config import ConfigError


def timeline():
    """Four requests from second 100 on; the last one failed after two chunks."""
    return Load(
        [
            Outcome(100.0, [100.5, 100.7, 101.1], prompt_tokens=10, output_tokens=3, end=101.2),  # TPOT (1.1 - 0.5) / 2
            Outcome(100.0, [100.2], prompt_tokens=20, output_tokens=1, end=100.2),
            Outcome(101.2, [101.6, 103.2], prompt_tokens=30, output_tokens=5, end=103.2),  # TPOT 1.6 / 4
            Outcome(101.2, [101.4, 101.5], prompt_tokens=40, output_tokens=2, end=102.0, cause="HTTP 500", error="x"),
        ],
        started=100.0,
        seconds=4.0,
    )


def test_every_figure_of_a_timeline():
    found = figures(timeline(), [50, 99], {"ttft": 450.0, "tpot": 350.0})
    assert (found.completed, found.failed, dict(found.failures)) == (3, 1, {"HTTP 500": 1})
    assert (found.total_input_tokens, found.total_output_tokens) == (60, 9)
    assert found.request_throughput == 3 / 4
    assert found.output_throughput == 9 / 4
    assert found.total_throughput == 69 / 4
    assert found.times["ttft"].mean == pytest.approx((500 + 200 + 400) / 3)
    assert found.times["ttft"].median == pytest.approx(400)
    assert found.times["tpot"].mean == pytest.approx((300 + 400) / 2), "an answer of one token has no TPOT"
    assert found.times["itl"].mean == pytest.approx((200 + 400 + 1600) / 3)
    assert found.times["e2el"].mean == pytest.approx((1100 + 200 + 2000) / 3)
    assert found.times["e2el"].std == pytest.approx(np.std([1100, 200, 2000]))
    assert dict(found.times["ttft"].percentiles)[99] == pytest.approx(400 + (500 - 400) * 0.98)
    # The first is too late with its first token, the third too slow; the second meets both, its TPOT counts as 0.
    assert found.goodput == 1 / 4
    # Second 0 has three chunks of a token each, second 1 one of those and one that carries half of 5 tokens.
    assert found.peak_output == pytest.approx(3.5)
    assert found.peak_concurrency == 2, "two began as the first ended"
    assert found.tokens_per_chunk == pytest.approx(9 / 6)


def test_nothing_but_failures():
    load = Load([Outcome(1.0, end=2.0, cause="timeout", error="x")], 1.0, 1.0)
    found = figures(load, [99], {"ttft": 1.0})
    assert (found.completed, found.failed, found.goodput, found.peak_output) == (0, 1, 0.0, 0)
    assert found.times["itl"].mean == 0


def test_the_block_is_what_people_grep():
    found = figures(timeline(), [50, 99], {"ttft": 450.0})
    lines = block(found, metrics=["ttft", "tpot", "itl", "e2el"], max_concurrency=7, request_rate=2.5, server=None)
    lines = lines.splitlines()
    assert lines[:16] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             7",
        "Request rate configured (RPS):           2.50",
        "Benchmark duration (s):                  4.00",
        "Total input tokens:                      60",
        "Total generated tokens:                  9",
        "Request throughput (req/s):              0.75",
        "Request goodput (req/s):                 0.50",
        "Output token throughput (tok/s):         2.25",
        "Peak output token throughput (tok/s):    3.50",
        "Peak concurrent requests:                2.00",
        "Total token throughput (tok/s):          17.25",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          366.67",
    ]
    assert lines[16:19] == [
        "Median TTFT (ms):                        400.00",
        "P50 TTFT (ms):                           400.00",
        "P99 TTFT (ms):                           498.00",
    ]
    rules = [line.strip("-") for line in lines if line.startswith("-")]
    assert rules == [
        "Time to First Token", "Time per Output Token (excl. 1st token)", "Inter-token Latency", "End-to-end Latency", "Server side",
        "Failures by cause",
    ]  # fmt: skip
    assert lines[-2:] == ["HTTP 500:                                1", "=" * 50]


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 50.0, math.inf])
def test_the_last_request_leaves_at_count_over_rate(burstiness):
    delays = Arrivals(rate=20.0, burstiness=burstiness).delays(50, seed=3)
    assert delays[-1] == pytest.approx(50 / 20)
    assert delays == sorted(delays)
    assert delays[0] >= 0


def test_gaps_are_gamma_distributed():
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff([0, *Arrivals(rate=10.0, burstiness=burstiness).delays(20000, seed=1)])
        assert gaps.mean() == pytest.approx(0.1)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05), "1 / sqrt(shape)"


def test_all_at_once_and_ramps():
    assert Arrivals().delays(3, 0) == [0, 0, 0]
    steady = {"burstiness": math.inf}
    linear = Arrivals(ramp_up="linear", start_rate=1, end_rate=5, **steady).delays(5, 0)
    assert np.diff([0, *linear]) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    exponential = Arrivals(ramp_up="exponential", start_rate=1, end_rate=16, **steady).delays(5, 0)
    assert np.diff([0, *exponential]) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16])
    even = Arrivals(ramp_up="linear", start_rate=9.99, end_rate=10, burstiness=4.0).delays(5000, 0)
    assert even[-1] / 5000 == pytest.approx(0.1, rel=0.03), "the mean gap is 1 / rate whatever the burstiness"
    assert all(map(math.isfinite, Arrivals(ramp_up="linear", start_rate=0, end_rate=5).delays(4, 0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "--request-rate must be above 0"),
        ({"rate": math.nan}, "--request-rate must be above 0"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"start_rate": 1.0}, "need --ramp-up-strategy"),
        ({"ramp_up": "linear", "start_rate": 1.0}, "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        ({"ramp_up": "linear", "start_rate": 3.0, "end_rate": 2.0}, "below --ramp-up-end-rps 2"),
        ({"ramp_up": "exponential", "start_rate": 0.0, "end_rate": 2.0}, "above 0"),
        ({"ramp_up": "linear", "start_rate": 1.0, "end_rate": 2.0, "rate": 1.0}, "contradicts"),
    ],
)
def test_impossible_arrivals(options, message):
    with pytest.raises(ConfigError, match=message):
        Arrivals(**options)


def test_objectives():
    assert read_objectives(["ttft:200", "e2el:3000"]) == {"ttft": 200, "e2el": 3000}
    for words in (["itl:3"], ["ttft"], ["ttft:-1"], ["ttft:nan"], ["ttft:1", "ttft:2"]):
        with pytest.raises(ConfigError, match="--goodput"):
            read_objectives(words)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_from_bytes_split_anywhere(line_end, size):
    text = line_end.join(
        [": a comment", "", 'data: {"text":"hé 😀"}', "", "event: x", "data:a", "data: b", "", "data: [DONE]", "", ""]
    )
    data, reader = text.encode(), EventReader()
    events = [event for place in range(0, len(data), size) for event in reader.feed(data[place : place + size])]
    assert events == ['{"text":"hé 😀"}', "a\nb", "[DONE]"]


def read(*events):
    """The outcome of events that come a second apart, from second 1 on, for a request of second 0."""
    outcome = Outcome(0.0, prompt_tokens=7)
    reader = AnswerReader(outcome)
    for at, event in enumerate(events, 1):
        reader.event(event, float(at))
    reader.close()
    return outcome


def test_the_first_token_of_a_chat_is_not_the_role():
    outcome = read(
        '{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
        '{"choices":[{"delta":{"reasoning_content":"hm"},"finish_reason":null}]}',
        '{"choices":[{"delta":{"content":"hi"},"finish_reason":null}]}',
        '{"choices":[{"delta":{},"finish_reason":"stop"}]}',
        '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}',
        "[DONE]",
    )
    assert outcome.is_success
    assert (outcome.ttft, outcome.itls, outcome.latency) == (2.0, [1.0, 1.0], 4.0)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.text) == (9, 4, "hmhi")
    assert outcome.tpot == pytest.approx(2 / 3)


def test_an_error_in_the_stream_is_a_failure_whatever_came_before():
    outcome = read(
        '{"choices":[{"text":"a"}]}', '{"error":{"message":"out of pages","reason":"engine_error"}}', "[DONE]"
    )
    assert (outcome.cause, outcome.error) == ("error in the stream (engine_error)", "out of pages")
    assert outcome.text == "a"


def test_endings():
    done = '{"choices":[{"text":"a","finish_reason":"length"}]}'
    assert read(done).is_success, "not every server says [DONE]"
    assert read('{"choices":[{"text":"a"}]}').cause == "ended early"
    assert read("[DONE]").cause == "no answer"
    assert read("<html>").cause == "not JSON"
    assert read('{"choices":[{"text":"a","finish_reason":"error"}]}').cause == "finish_reason error"


BEFORE = """
# HELP vllm:x x
tpu_serve:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="a"} 1.0
tpu_serve:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="a"} 1.0
tpu_serve:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="a"} 1.0
tpu_serve:time_to_first_token_seconds_sum{engine="0",model_name="a"} 0.05
tpu_serve:time_to_first_token_seconds_count{engine="0",model_name="a"} 1.0
tpu_serve:prefix_cache_queries_total{engine="0"} 100
tpu_serve:prefix_cache_hits_total{engine="0"} 10
tpu_serve:compile_total{phase="start"} 9
tpu_serve:compile_total{phase="serving"} 1
vllm:prefix_cache_hits_total{engine="0"} 777
"""
AFTER = """
tpu_serve:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="a"} 2.0
tpu_serve:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="a"} 4.0
tpu_serve:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="a"} 5.0
tpu_serve:time_to_first_token_seconds_sum{engine="0",model_name="a"} 2.05
tpu_serve:time_to_first_token_seconds_count{engine="0",model_name="a"} 5.0
tpu_serve:prefix_cache_queries_total{engine="0"} 200
tpu_serve:prefix_cache_hits_total{engine="0"} 60
tpu_serve:compile_total{phase="start"} 9
tpu_serve:compile_total{phase="serving"} 3
"""


def test_differences_of_the_servers_metrics():
    side = between(Snapshot.read(BEFORE), Snapshot.read(AFTER))
    assert side.mean_ttft_ms == pytest.approx(500)
    # Of four, one lies below 0.1, two from there to 0.5, and one above: half of them are half into the second bucket.
    assert side.p50_ttft_ms == pytest.approx(100 + 400 / 2)
    assert side.p99_ttft_ms == pytest.approx(500), "no more is known than that it lies above the last bound"
    assert side.kv_hit_rate == 0.5
    assert side.num_compiled == 2
    assert side.mean_queue_ms is None


def test_metrics_of_another_server():
    side = between(
        Snapshot.read(""),
        Snapshot.read('vllm:prefix_cache_queries_total{a="b,} "} 4\nvllm:prefix_cache_hits_total 1\n'),
    )
    assert side.kv_hit_rate == 0.25
    assert side.num_compiled is None
    assert between(Snapshot.read("<html>"), Snapshot.read("")).mean_ttft_ms is None
