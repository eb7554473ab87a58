"""`bench models` without a compiler: reading a program's text, walking it, the bound, and the command around."""

import dataclasses
import json

import jax
import pytest

from tpu_serve.bench.compiled.collectives import collectives
from tpu_serve.bench.compiled.machine import CORES, HBM_EFFICIENCY, LINK_LATENCY_SECONDS
from tpu_serve.bench.models import cells, programs, table
from tpu_serve.bench.models.bound import least
from tpu_serve.bench.models.hlo import parse
from tpu_serve.bench.models.operands import recurrence_scalars
from tpu_serve.bench.models.parts import ATTENTION, MOE, OUTPUT, REST, part_of_frames, parts_of
from tpu_serve.bench.models.step import DECODE, PREFILL, Step
from tpu_serve.bench.models.target import make
from tpu_serve.bench.models.timeline import Timeline, sent_bytes
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.gated_delta_rule.problem import Problem

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
    projection = ("/x/tpu_serve/layers/transformer.py", "linear"), ("/x/tpu_serve/models/gemma4.py", "Gemma4._attend")
    assert part_of_frames(projection) == ATTENTION


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


def test_what_recurrent_layers_are_given():
    problem = Problem(2048, 256, 1, 4)
    grid, counts, row, chunk, starts = (
        recurrence_scalars(Step.of(PREFILL, 2048), problem)["gated_delta_rule"][place] for place in range(5)
    )
    assert (grid, counts.tolist()) == (33, [0, 32, 0]), "one sequence in 32 chunks of 64, and the step before them"
    assert (row[:32].tolist(), chunk[:32].tolist(), starts[:2].tolist()) == ([0] * 32, list(range(32)), [0, 2048])
    grid, counts = (
        recurrence_scalars(STEP, dataclasses.replace(problem, num_tokens=64))["gated_delta_rule"][place]
        for place in range(2)
    )
    assert (grid, counts.tolist()) == (1, [64, 0, 0]), "64 tokens that are alone in their row"


def test_cells():
    assert len(cells.select(None, None, None)) == 30, "six models on their slices, five steps"
    (cell,) = cells.select(["Qwen3.5-397B-A17B-FP8"], ["decode8"], None)
    assert (cell.slice.num_devices, len(cells.all_layers(cell.model))) == (16, 60)
    with pytest.raises(ConfigError, match="--cells decode7 is unknown"):
        cells.select(None, ["decode7"], None)


@pytest.mark.parametrize(
    ("operation", "wanted"),
    [
        ("all-reduce", 2 * 3 / 4 / 2), ("all-gather", 3 / 4 / 2), ("reduce-scatter", 8 * 3 / 4 / 2), ("all-to-all", 3 / 4),
        ("collective-permute", 1),
    ],
)  # fmt: skip
def test_what_leaves_a_chip_of_two_devices(operation, wanted):
    (reduced,) = collectives(TEXT)
    one = dataclasses.replace(reduced, operation=operation, num_devices=8, num_bytes=1000)
    assert sent_bytes(one, TPU_CHIPS["tpu7x"]) == pytest.approx(1000 * wanted)
    if operation != "collective-permute":
        assert sent_bytes(dataclasses.replace(one, num_devices=2), TPU_CHIPS["tpu7x"]) == 0, "it stays in the chip"


@pytest.mark.parametrize(("chip", "links"), [("v6e", 2), ("tpu7x", 2 * 2 / 2)])
def test_the_bound_of_a_published_model(chip, links):
    """Qwen3-30B-A3B on eight devices, from its sizes: 48 layers, hidden size 2048, 128 experts of 768, 4 KV heads of 128."""
    target = make(jax.devices(), "Qwen3-30B-A3B", STEP, chip=TPU_CHIPS[chip])
    found = least(target.design, STEP, target.plan.page_size, ici_bytes=1e6)
    experts = 128 / 8 * (1 - (1 - 8 / 128) ** 64) * 3 * 2048 * 768
    attention = 2 * 2048 * 4 * 128 + 2048 * 2 * 128  # queries and output of four heads, keys and values of one
    router = 2048 * 128
    head = 151936 / 8 * 2048
    assert found.weight_bytes == pytest.approx(2 * (48 * (experts + attention + router) + head), rel=0.002)
    assert found.cache_bytes == 64 * (2048 + 1) * 48 * 2 * 128 * 2
    products = 64 * (48 * (8 / 8 * 3 * 2048 * 768 + attention + router + 2 * 4 * 128 * 2048) + head)
    peaks = TPU_CHIPS[chip]
    assert found.seconds == pytest.approx(
        {
            "hbm": (found.weight_bytes + found.cache_bytes) / peaks.hbm_bytes_per_second,
            "mxu": 2 * products / peaks.peak_ops["bfloat16"],
            "ici": 1e6 / (links * 1e11),
        },
        rel=0.01,
    )


def answer(cell):
    return {
        "error": None, "refusal": False, "memory": {
            "weights": {"experts": 2**30}, "caches": 30 * 2**30, "sampler": 0, "device": 2**35, "pages": [9], "cached_tokens": 10,
        },
        "moe": {"way": "fused D", "tiles": "", "reason": "", "format": "bfloat16"},
        "bytes": {"arguments": 10, "outputs": 10, "temporaries": 2**30 + 1, "aliases": 0, "code": 100},
        "seconds": {"trace": [1.0, 1.0], "compile": [63.0, 52.0], "read": [1.0, 1.0]},
        "walk": {
            "us": 580.0, "by_part": {MOE: 480.0, OUTPUT: 100.0}, "by_origin": {"simulated": 290.0}, "waiting_us": 0.0, "hbm_bytes": 1.0,
            "ici_bytes": 1.0, "collectives": {f"{MOE}/all-reduce": [48.0, 2.0 * 2**20]}, "kernels": {}, "unread": [], "unknown": [], "loops": [],
        },
        "bound": {"weight_bytes": 1.0, "cache_bytes": 1.0, "seconds": {"hbm": 48e-6, "mxu": 0.0, "ici": 0.0}},
    }  # fmt: skip


def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    asked = []

    def run(cell, timeout_s, stop=None):
        asked.append(cell.label)
        return programs.Program(cell, {"error": "out of memory"} if len(asked) == 2 else answer(cell))

    monkeypatch.setattr(programs, "run_cell", run)
    file, page = tmp_path / "models.jsonl", tmp_path / "models.md"
    words = ["bench", "models", "--models", "Qwen3-30B-A3B", "--slices", "v6e:2x4", "--cells", "decode8", "decode256"]
    words += ["--output", str(file), "--page", str(page)]
    assert main(words) == 1, "one of two programs failed"
    assert "decode 256: failed, out of memory" in capsys.readouterr().out
    assert "- Qwen3-30B-A3B v6e 2x4 decode 256: failed, out of memory" in page.read_text()
    assert main([*words, "--resume"]) == 0
    assert asked[2:] == ["Qwen3-30B-A3B v6e 2x4 decode 256"], "what failed is tried again, what did not is kept"
    document = json.loads(file.with_suffix(".json").read_text())
    assert [(row["outcome"], row["num_tokens"], row["walk"]["us"]) for row in document["rows"]] == [
        ("compiled", 8, 580.0),
        ("compiled", 256, 580.0),
    ]
    text = page.read_text()
    assert (
        "```bash\ntpu-serve bench models --models Qwen3-30B-A3B --cells decode8 decode256 --slices v6e:2x4 --page "
        in text
    )
    assert (
        "| Qwen3-30B-A3B | v6e 2x4 | decode 8 | fused D bfloat16 | 0.58 | 0.05 | hbm | 12.1 | 83% | 0% | 17% | 0% | 50% | - |"
        in text
    )
    assert "| decode 8 | 48 all-reduce 2.00 MiB | - | - | - | - | - | 1 | 52 |" in text
    assert "32.00 (too much) | 32.00 | 10 (too few) |" in text, "a byte too many, and ten tokens for eight sequences"
    assert "Not in the tables" not in text


def test_what_nobody_has_compiled_yet_is_told_by_model():
    some = cells.select(["Qwen3-30B-A3B"], ["decode8", "decode256", "prefill2048"], None)
    found = {
        cell: programs.Program(cell, answer(cell))
        for cell in some
        if cell.step.num_tokens != 256 and cell.slice.chip == "v6e"
    }
    page = table.page(some, found, "", {})
    assert "- Qwen3-30B-A3B v6e 2x4: decode 256 not compiled yet\n" in page
    assert "- Qwen3-30B-A3B tpu7x 2x2x1: decode 8, decode 256, prefill 2048 not compiled yet\n" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "Qwen9"], "--models Qwen9 is unknown; known are Qwen3-30B-A3B"),
        (["--resume"], "--resume needs the --output FILE"),
        (["--output", "x.md"], "name a file as in models.jsonl"),
        (["--page", "nowhere/x.md"], "name a file as in models.md"),
        (["--models", "gpt-oss-120b", "--slices", "tpu7x:2x2x2"], "none of the --models is for one of the --slices"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["bench", "models", *words]) == 2
    assert message in capsys.readouterr().err
