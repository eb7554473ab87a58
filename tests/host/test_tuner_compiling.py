"""What the tuner makes of a compiled program: accepted or not, and with which score."""

import dataclasses
import json

import pytest
from tuner_fakes import job

from tpu_serve.bench.compiled.report import CompileWorkerFailed
from tpu_serve.device.chip import MIB
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.tuner import compiling
from tpu_serve.tuner.compiling import Schedule, copied_weights, most_temporary_bytes, objection, scored, weight_bytes
from tpu_serve.tuner.estimate import estimate, outside_seconds
from tpu_serve.tuner.trial import Stopped, Task

SMALL = Problem(8, 16, 2, 256, 384, 4)
G = Config("G", 256, 3, 128, 128, "xla_ag", "push")
HLO = """HloModule jit_run, entry_computation_layout={(bf16[4,384,256]{2,1,0:T(8,128)(2,1)})->bf16[8,256]{1,0}}

ENTRY %main (p: bf16[4,384,256]) -> bf16[8,256] {
  %down = bf16[4,384,256]{2,1,0:T(8,128)(2,1)} parameter(4)
  %same = bf16[4,384,256]{2,1,0:T(8,128)(2,1)} bitcast(%down)
  %near = (bf16[4,384,256]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%down)
  ROOT %fused_moe_d.3 = bf16[2,256]{1,0:T(8,128)(2,1)} custom-call(%same, %other), custom_call_target="tpu_custom_call"
}
"""


def task_of(config=None, num_tokens=1024):
    one = job(num_tokens)
    return Task(one.workload, one.chip, one.problem, config or heuristic(one.problem, one.chip))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  %copy.7 = bf16[4,384,256]{1,2,0:T(8,128)(2,1)} copy(%down)", ["copy copy.7"]),
        ("  %t = bf16[4,2,256,384]{3,2,1,0} fusion(%gate_up), kind=kLoop", ["fusion t"]),
        ("  %s = (bf16[4,384,256]{2,1,0}, bf16[4,384,256]{2,1,0}, u32[]{:S(2)}) copy-start(%down)", ["copy-start s"]),
        ("  %tokens = bf16[8,8,128]{2,1,0} copy(%x)", []),
    ],
)
def test_a_copy_of_weights_is_found(line, found):
    text = HLO.replace("  ROOT", f"{line}\n  ROOT")
    assert copied_weights(text, SMALL) == found
    reason = objection(SMALL, G, 0, text)
    assert (reason is not None) == bool(found)
    assert not found or reason == f"the program copies weights at every call: {found[0]}"


def test_a_temporary_as_large_as_a_weight_is_too_much():
    p = task_of(num_tokens=64).problem
    down = weight_bytes(p) / 3
    assert weight_bytes(p) == 16 * 3 * 2048 * 768 * 2
    config = Config("D", 768)
    assert objection(p, config, 0.1 * weight_bytes(p), "") is None
    assert "MiB of HBM beside its arguments" in objection(p, config, down, "")


def test_rows_of_mode_g_may_lie_in_hbm():
    p = task_of().problem
    # Tokens of the group, and rows that come home to an eighth of them.
    rows = 1024 + 128 * 8
    spare = most_temporary_bytes(p, G) - 0.1 * weight_bytes(p) - 8 * MIB
    assert spare == 2 * rows * 2048 * 2
    assert most_temporary_bytes(p, dataclasses.replace(G, combine="rs")) > most_temporary_bytes(p, G)


FOUND = {
    "error": None,
    "modelled_us": 120.5,
    "temporary_bytes": MIB,
    "compile_seconds": 3.0,
    "bound_us": 90.0,
    "untimed": {"collectives": 3, "copies": 2.0},
}


def test_a_schedules_score_has_what_xla_sends():
    gathered, pushed = (task_of(dataclasses.replace(G, dispatch=dispatch)) for dispatch in ("xla_ag", "push_ag"))
    trial = scored(pushed, FOUND, "")
    assert (trial.outcome, trial.score, trial.score_kind) == ("worked", 120.5, "schedule")
    outside = outside_seconds(gathered.problem, gathered.config, gathered.chip) * 1e6
    assert outside > 10
    assert scored(gathered, FOUND, "").score == pytest.approx(120.5 + outside, abs=0.01)


def test_the_final_sum_is_that_of_finite_rows():
    trial = scored(task_of(), FOUND | {"untimed": {"unknown": ["moe_combine_gather.1"]}}, "")
    assert trial.score_kind == "schedule"


@pytest.mark.parametrize(
    "untimed",
    [{"unread": ["fused_moe_g"]}, {"unknown": ["moe_combine_gather.1", "fused_moe_g"], "collectives": 1}, {"none": 1}],
)
def test_a_schedule_that_cannot_be_read_has_a_calculated_score(untimed):
    task = task_of()
    found = FOUND | {"untimed": untimed} | ({"modelled_us": None} if "none" in untimed else {})
    trial = scored(task, found, "")
    assert (trial.outcome, trial.score_kind) == ("worked", "bytes")
    assert trial.score == pytest.approx(estimate(task.problem, task.config, task.chip).us, abs=1e-3)
    assert trial.reason.startswith("its schedule cannot be read: ")


def test_a_program_that_is_not_good_enough_is_refused():
    assert scored(task_of(), FOUND | {"temporary_bytes": 2**30}, "").outcome == "refused"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (FOUND | {"error": "MosaicError: no"}, "refused"),
        (FOUND | {"error": "no answer after 600 s"}, "failed"),
        (CompileWorkerFailed("it\ndied"), "failed"),
        (FOUND, "worked"),
    ],
)
def test_what_the_report_says(monkeypatch, answer, outcome):
    asked = []

    def report(*arguments, **options):
        asked.append(arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(compiling, "report", report)
    task = task_of(dataclasses.replace(G, block_rows=256))
    executor = Schedule(600)
    assert executor.run(task).outcome == outcome
    target, arguments, chip, num_devices, timeout_s = asked[0]
    assert target == "tpu_serve.tuner.compiling:program"
    assert Task.of_json(json.loads(json.dumps(arguments["task"]))) == task
    assert (chip, num_devices, timeout_s) == ("v6e", 8, 600)
    executor._stop.set()
    with pytest.raises(Stopped):
        executor.run(task)
