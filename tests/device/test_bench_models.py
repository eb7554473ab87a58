"""`bench models` without a compiler: reading a program's text, walking it, going from a few layers to all, and the command around."""

import json

import pytest

from tpu_serve.bench.compiled.collectives import collectives
from tpu_serve.bench.compiled.machine import CORES, HBM_EFFICIENCY, LINK_LATENCY_SECONDS
from tpu_serve.bench.models import cells, rows
from tpu_serve.bench.models.hlo import parse
from tpu_serve.bench.models.parts import ATTENTION, MOE, OUTPUT, REST, parts_of
from tpu_serve.bench.models.step import DECODE, PREFILL, Step
from tpu_serve.bench.models.timeline import Timeline
from tpu_serve.bench.models.whole import Extrapolation
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError

# A step of one layer as the compiler writes it, shortened: a prefetch, an attention loop with a loop inside, an all-reduce, a kernel, and a
# conditional that no request takes. Parents of frames are counted from one.
TEXT = """HloModule step, is_scheduled=true
FileNames
1 "/x/tpu_serve/layers/attention.py"
2 "/x/tpu_serve/layers/transformer.py"
3 "/x/tpu_serve/layers/sampler.py"

FunctionNames
1 "paged_attention"
2 "_online_softmax"
3 "run_decoder.<locals>.block"
4 "sample"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=1 function_name_id=2 line=2}
3 {file_name_id=2 function_name_id=3 line=3}
4 {file_name_id=3 function_name_id=4 line=4}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=1}

%fused_computation (p: f32[8,128]) -> f32[8,128] {
  ROOT %inside = f32[8,128]{1,0:T(8,128)} negate(%p), metadata={op_name="x" stack_frame_id=3}
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner_body (w: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %w = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %gte = f32[8,128]{1,0:T(8,128)} get-tuple-element(%w), index=1
  ROOT %scores = (s32[], f32[8,128]{1,0:T(8,128)}) fusion(%gte), kind=kLoop, calls=%fused_computation
}

%outer_body (w.1: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %w.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT %while.2 = (s32[], f32[8,128]{1,0:T(8,128)}) while(%w.1), condition=%never, body=%inner_body, metadata={op_name="a" stack_frame_id=3}
}

%idle (q: f32[8,128]) -> f32[8,128] {
  ROOT %q = f32[8,128]{1,0:T(8,128)} parameter(0)
}

%draw (q.1: f32[8,128]) -> f32[8,128] {
  %q.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %expensive = f32[8,128]{1,0:T(8,128)} fusion(%q.1), kind=kLoop, calls=%fused_computation
}

ENTRY %main (w.2: bf16[2048,2048]) -> f32[8,128] {
  %weight = bf16[2048,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %copy-start = (bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[2048,2048]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%weight)
  %x = f32[8,128]{1,0:T(8,128)} fusion(%weight), kind=kLoop, calls=%fused_computation, metadata={op_name="b" stack_frame_id=1}
  %while.1 = (s32[], f32[8,128]{1,0:T(8,128)}) while(%x), condition=%never, body=%outer_body, metadata={op_name="c" stack_frame_id=2}
  %done = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
  %copy-done = bf16[2048,2048]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fused_moe_d.1 = f32[8,128]{1,0:T(8,128)} custom-call(%done, %copy-done), custom_call_target="tpu_custom_call", backend_config={"n":"(
more"}
  %all-reduce.1 = f32[1024,1024]{1,0:T(8,128)} all-reduce(%fused_moe_d.1), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %choose = f32[8,128]{1,0:T(8,128)} conditional(%flag, %all-reduce.1, %all-reduce.1), branch_computations={%idle, %draw}, metadata={op_name="d" stack_frame_id=4}
}
"""


def facts(us, hbm_bytes=0, **more):
    return {"us": us, "hbm_bytes": hbm_bytes, "depends_on_unknown": False, **more}


STEP = Step.of(DECODE, 64)


def walk(step=STEP, windows=(None,), **kernels):
    known = {"x": facts(1.0), "scores": facts(2.0), "expensive": facts(1e9), "fused_moe_d.1": facts(5.0, ici_bytes=7)}
    timeline = Timeline(
        parse(TEXT), known | kernels, collectives(TEXT), step, windows, CORES["v6e"], (2, 4)
    )  # fmt: skip
    return timeline.run()


def test_frames_and_parts():
    module = parse(TEXT)
    assert module.frames[3] == (
        ("/x/tpu_serve/layers/attention.py", "_online_softmax"),
        ("/x/tpu_serve/layers/attention.py", "paged_attention"),
        ("/x/tpu_serve/layers/transformer.py", "run_decoder.<locals>.block"),
    )
    parts = parts_of(module, module.entry)
    wanted = {"x": REST, "while.1": ATTENTION, "fused_moe_d.1": MOE, "choose": OUTPUT}
    assert {name: parts[name] for name in wanted} == wanted
    assert parts["copy-start"] == MOE, "the part that uses what was copied"
    assert parts_of(module, "inner_body", ATTENTION)["scores"] == ATTENTION, "as what it is called from"


def test_a_walk_adds_up():
    found = walk()
    # 64 tokens in blocks of 32, and 2048 keys in blocks of 128.
    attention = 2 * 16 * 2.0
    reduced = 4 * 1024 * 1024
    # Two corner chips of a 2x4 mesh have two links: what the other seven chips have goes over these, twice.
    links = 2 * (7 / 8 * reduced / (2 * 1e11) + LINK_LATENCY_SECONDS) * 1e6
    # The copy has all the memory's rate for itself, and is done long before.
    assert found.waiting_us == 0
    assert found.us == pytest.approx(1.0 + attention + 5.0 + links)
    assert found.by_part == pytest.approx({REST: 1.0, ATTENTION: attention, MOE: 5.0, OUTPUT: links})
    assert found.by_origin["simulated"] == pytest.approx(1.0 + attention + 5.0)
    assert found.hbm_bytes == 2048 * 2048 * 2
    assert (found.ici_bytes, found.collective_bytes) == (7, 2 * 7 / 8 * reduced)
    assert found.collectives == {(OUTPUT, "all-reduce"): (1.0, reduced)}, "what uses it first is the output"
    assert "expensive" not in found.kernels, "nobody asked for what its branch does"
    assert (found.unread, found.unknown, found.loops) == (set(), set(), set())


def test_a_copy_that_is_late_is_waited_for():
    rate = 1.64e12 * HBM_EFFICIENCY / 1e6
    size = 2048 * 2048 * 2
    # The first kernel leaves nothing of the memory's rate, and the loops do not turn.
    found = walk(Step(DECODE, 64, 0), x=facts(10.0, 10.0 * rate))
    assert found.waiting_us == pytest.approx(size / rate)
    assert found.by_part[MOE] > size / rate, "what is copied is for the experts"


def test_windows_shorten_the_loop_and_what_is_unknown_is_told():
    assert walk(windows=(256,)).by_part[ATTENTION] == pytest.approx(2 * 2 * 2.0)
    assert walk(Step.of(PREFILL, 2048)).by_part[ATTENTION] == pytest.approx(64 * 8.5 * 2.0)
    found = walk(x={"error": "?"}, **{"fused_moe_d.1": facts(5.0, depends_on_unknown=True)})
    assert found.unknown == {"fused_moe_d.1"}
    assert found.unread == set(), "it is small"


def test_steps_see_what_is_there():
    step = Step.of(PREFILL, 6)
    pairs = [(query, key) for query in range(6) for key in range(query + 1)]
    assert step.num_seen(None) == len(pairs)
    assert step.num_seen(3) == sum(query - key < 3 for query, key in pairs)
    assert Step(DECODE, 4, 100).num_seen(30) == 120


def test_layers_are_extrapolated_by_kind():
    pattern = ("sliding", "sliding", "full") * 3
    programs = [("sliding", "full"), ("sliding", "sliding", "full"), ("sliding", "full", "full")]
    values = [100 + 5 * layers.count("sliding") + 7 * layers.count("full") for layers in programs]
    made = Extrapolation(programs, pattern)
    assert made.whole(values) == pytest.approx(100 + 5 * 6 + 7 * 3)
    assert made.of_layers(values) == pytest.approx({"sliding": 5, "full": 7})
    assert Extrapolation([pattern], pattern).whole([3.0]) == 3.0
    with pytest.raises(ValueError, match="each kind"):
        Extrapolation(programs[:2], pattern)


def test_programs_of_a_cell():
    (cell,) = cells.select(["Qwen3.5-397B-A17B-FP8"], ["decode8"], None)
    linear, full = "linear_attention", "full_attention"
    assert [job.layers for job in cells.jobs(cell)] == [(linear, full), (linear, linear, full), (linear, full, full)]
    assert len(cells.jobs(cell, is_whole=True)[0].layers) == 60
    assert len(cells.select(None, None, None)) == 30, "six models on their slices, five steps"
    with pytest.raises(ConfigError, match="--cells decode7 is unknown"):
        cells.select(None, ["decode7"], None)


def answer(job):
    layers = len(job.layers)
    return {
        "error": None, "refusal": False, "memory": {
            "weights": {"experts": 2**30}, "caches": 2**30, "sampler": 0, "device": 2**35, "pages": [9], "cached_tokens": 10,
        },
        "moe": {"way": "fused D", "tiles": "", "reason": "", "format": "bfloat16"},
        "bytes": {"arguments": 10, "outputs": 10, "temporaries": 5, "aliases": 0, "code": 100 * layers},
        "seconds": {"trace": [1.0, 1.0], "compile": [3.0, 2.0 + 10.0 * layers], "read": [1.0, 1.0]},
        "walk": {
            "us": 100.0 + 10.0 * layers, "by_part": {MOE: 10.0 * layers, OUTPUT: 100.0}, "by_origin": {"simulated": 100.0},
            "waiting_us": 0.0, "hbm_bytes": 1.0, "ici_bytes": 1.0, "collectives": {f"{MOE}/all-reduce": [1.0 + 2.0 * layers, 2.0 * layers]},
            "kernels": {}, "unread": [], "unknown": [], "loops": [],
        },
        "bound": {"weight_bytes": 1.0, "cache_bytes": 1.0, "seconds": {"hbm": 1e-6 * layers, "mxu": 0.0, "ici": 0.0}},
    }  # fmt: skip


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    asked = []

    def run(job, timeout_s, stop=None):
        asked.append(job.layers)
        return rows.Program(job, {"error": "out of memory"} if len(asked) == 2 else answer(job))

    monkeypatch.setattr(rows, "run_job", run)
    file = tmp_path / "models.jsonl"
    words = ["bench", "models", "--models", "Qwen3-30B-A3B", "--slices", "v6e:2x4", "--cells", "decode8"]
    assert main([*words, "--output", str(file)]) == 1, "one of two programs failed"
    assert "out of memory" in capsys.readouterr().out
    assert main([*words, "--output", str(file), "--resume"]) == 0
    assert len(asked) == 3, "what failed is tried again, what did not is kept"
    (row,) = json.loads(file.with_suffix(".json").read_text())["rows"]
    assert row["step_us"] == pytest.approx(100 + 48 * 10)
    assert row["seconds"]["compile"][1] == pytest.approx(2 + 48 * 10)
    assert row["bound_us"] == pytest.approx(48)
    assert row["collectives_of_layer"] == {"full_attention": {f"{MOE}/all-reduce": [2.0, 2.0]}}
    page = file.with_suffix(".md").read_text()
    assert "| Qwen3-30B-A3B | v6e 2x4 | decode 8 | fused D bfloat16 | 0.58 | 0.05 | hbm | 12.1 | 83% |" in page
    assert "10 (too few)" in page, "eight sequences of 2048 tokens do not fit ten"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "Qwen9"], "--models Qwen9 is unknown; known are Qwen3-30B-A3B"),
        (["--resume"], "--resume needs the --output FILE"),
        (["--output", "x.md"], "name a file as in models.jsonl"),
        (["--whole", "--layers", "2"], "leave one of them out"),
        (["--models", "gpt-oss-120b", "--slices", "tpu7x:2x2x2"], "none of the --models is for one of the --slices"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["bench", "models", *words]) == 2
    assert message in capsys.readouterr().err
