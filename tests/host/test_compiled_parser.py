"""Compiled schedules: their text parsed and their scalar programs run, from two dumps of the compiler kept as fixtures.

The fixtures are what libtpu 0.0.42 wrote for `gather` (16 rows of indices, v6e) and `push` (16 rows, four devices of tpu7x) of
tests/aot/compiled_targets.py.
"""

from pathlib import Path

import numpy as np
import pytest

from tpu_serve.bench.compiled.execution import Execution
from tpu_serve.bench.compiled.findings import Findings
from tpu_serve.bench.compiled.machine import CORES
from tpu_serve.bench.compiled.schedule import UnsupportedSchedule, parse, parse_instruction

FIXTURES = Path(__file__).parent.parent / "fixtures" / "compiled"
GATHER = (FIXTURES / "gather_v6e.txt").read_text()
PUSH = (FIXTURES / "push_tpu7x.txt").read_text()


def index(first=0):
    """Rows that column 3 asks for; everything else is out of bounds."""
    table = np.full((16, 8), 1 << 20)
    table[:, 3] = first + np.arange(16)
    return table


def run(text, chip="v6e", grid=(1, 1), scalars=None):
    execution = Execution(parse(text), CORES[chip], grid, scalars or {})
    execution.run()
    return execution, Findings(execution).summary()


def program(*bundles):
    """A schedule's text from the contents of its bundles."""
    return "".join(f"  {address:#x}   :  {{ {text} }}\n" for address, text in enumerate(bundles)).replace(
        "0x0 ", "0 ", 1
    )


def value_of(*bundles, chip="v6e"):
    """What a program without branches stores at [#allocation9]."""
    execution, _ = run(program(*bundles), chip)
    return execution.memory.smem[execution.memory.symbol("#allocation9")]


STORE = "%9 = sst [smem:[#allocation9]] %s5_s1"


def test_forms_of_instructions():
    i = parse_instruction(" %s12_s3 = sadd.s32 4294967295, %s5_s1 ")
    assert (i.name, i.result, i.operands, i.guard) == ("sadd.s32", "%s12_s3", ("4294967295", "%s5_s1"), None)
    i = parse_instruction("%s39_s1 = smov (!%p246_p13, %s250_s1), %s249_s18")
    assert (i.guard, i.negated, i.otherwise, i.operands) == ("%p246_p13", True, "%s250_s1", ("%s249_s18",))
    i = parse_instruction("%s7_s7 = sld [smem:[#allocation46 + $0x2]] (!%p704_p0)")
    assert (i.guard, i.negated, i.operands) == ("%p704_p0", True, ("[smem:[#allocation46 + $0x2]]",))
    i = parse_instruction("%20 = sbr.rel (!%p6_p2) target bundleno = 16 (0x10), region = 94")
    assert (i.target, i.guard, i.negated) == (16, "%p6_p2", True)
    i = parse_instruction("%8 = sst [smem:[#allocation1 + %s2_s2]] %s3_s3")
    assert i.operands == ("[smem:[#allocation1 + %s2_s2]]", "%s3_s3")
    i = parse_instruction("%47 = dma.hbm_to_vmem [thread:$0]  (%p8_p6), %s1_s9, 8192, %s2_s3, [#allocation10 + $0x1]")
    assert (i.guard, i.operands[3]) == ("%p8_p6", "[#allocation10 + $0x1]")
    spill = parse_instruction("%388 = vst [vmem:[#allocation190_spill] sm:$0xff] %v50_v3")
    assert (spill.spill, spill.scalar) == (True, False)
    assert not parse_instruction("%388 = vst [vmem:[#allocation19] sm:$0xff] %v50_v3").spill


def test_parsed_program():
    schedule = parse(GATHER)
    assert len(schedule.bundles) == 79
    operands = {(o.index, o.space, o.dtype, o.shape) for o in schedule.operands.values()}
    assert {(0, "value", "s32", (1,)), (1, "vmem", "s32", (16, 8))} < operands
    (branch,) = [i for bundle in schedule.bundles[20:] for i in bundle if i.target is not None]
    assert branch.target == 22
    assert {i.note for bundle in parse(PUSH).bundles for i in bundle if i.name == "dma.general"} == {"vmem-to-vmem"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "no bundles"),
        (program("%1 = sfence", "%2 = sfence").replace("0x1", "0x2"), "expected"),
        (program("%20 = sbr.rel (!%p6_p2) somewhere"), "without a target"),
    ],
)
def test_unknown_texts_are_refused(text, words):
    with pytest.raises(UnsupportedSchedule, match=words):
        parse(text)


def test_trips_follow_the_scalar_operand():
    static = len(parse(GATHER).bundles)
    for trips in (0, 1, 5, 9):
        _, found = run(GATHER, scalars={0: [trips], 1: index()})
        assert found["dma"].get("hbm-to-vmem", {"count": 0})["count"] == trips
        assert found["hbm_bytes"] == (trips + 1) * 4096, "what is gathered, and the result"
        assert (found["failed_checks"], found["unanswered_waits"]) == ({}, 0)
        assert found["assumed"] == {}
        loop = found["hottest_loop"]
        if trips == 0:
            assert loop is None
            assert found["bundles_executed"] < static
        else:
            assert loop["trips"] == trips
            assert found["bundles_executed"] == static + (trips - 1) * loop["bundles"]


def test_stalls_and_bundles_make_the_cycles():
    execution, found = run(GATHER, scalars={0: [3], 1: index()})
    stalls = sum(execution.engines.stall_dma) + sum(execution.engines.stall_peer)
    assert found["cycles"] == round(found["bundles_executed"] + stalls)
    assert sum(phase["cycles"] for phase in found["phases"]) == pytest.approx(found["cycles"], abs=3)
    assert [phase["kind"] for phase in found["phases"]] == ["straight", "loop", "straight"]
    # One block after the other, each waited for: the latency counts every time.
    assert found["stall_dma_us"] > 4 * 0.44


def test_the_programs_own_checks_see_wrong_operands():
    assert run(GATHER, scalars={0: [5], 1: index(16384 - 5)})[1]["failed_checks"] == {}
    ((check, times),) = run(GATHER, scalars={0: [5], 1: index(16384 - 4)})[1]["failed_checks"].items()
    assert check.startswith("BoundsCheck")
    assert check.endswith("dma.hbm_to_vmem")
    assert times == 1


def test_operands_not_given_are_named():
    assert run(GATHER)[1]["assumed"] == {"operand 0 is 0": 1, "operand 1, copied into SMEM, is 0": 1}


def test_remote_copies_and_signals():
    _, found = run(PUSH, "tpu7x", (2, 1, 1))
    size = 16 * 2048
    assert (found["ici_dmas"], found["ici_bytes"]) == (2, 2 * size), "to both devices of the other chip"
    assert (found["sibling_dmas"], found["sibling_bytes"]) == (1, size), "to the other device of its own"
    assert found["remote_signals"] == 6
    assert (found["unanswered_waits"], found["failed_checks"]) == (0, {}), "every semaphore ends at zero"
    # The barrier, the data and the credits each cross the links once.
    assert 3 * 1.5 < found["stall_peer_us"] < 3 * 1.5 + 2


def test_slots_after_a_branch_are_executed():
    bundles = [
        "%s5_s1 = smov 1 ;; %p1_p0 = scmp.lt.s32.totalorder 1, 2",
        "%3 = sbr.rel (%p1_p0) target bundleno = 9 (0x9), region = 1",
        *["%s6_s2 = sadd.s32 %s5_s1, 1", "%s7_s3 = sadd.s32 %s6_s2, 10", "%s8_s4 = sadd.s32 %s7_s3, 100"],
        *["%s9_s5 = sadd.s32 %s8_s4, 1000", "%s10_s6 = sadd.s32 %s9_s5, 10000", "%s11_s7 = sadd.s32 %s9_s5, 20000"],
        "%s12_s8 = sadd.s32 %s9_s5, 30000",
        "%9 = sst [smem:[#allocation9]] %s10_s6 ;; %10 = sst [smem:[#allocation9 + $0x1]] %s11_s7",
    ]
    found = {}
    for chip in ("v6e", "tpu7x"):
        execution, summary = run(program(*bundles), chip)
        place = execution.memory.symbol("#allocation9")
        found[chip] = (execution.memory.smem[place], execution.memory.smem[place + 1], summary["bundles_executed"])
    assert found == {"v6e": (0, 0, 7), "tpu7x": (11112, 21112, 9)}


@pytest.mark.parametrize(
    ("bundles", "value"),
    [
        (["%s5_s1 = sadd.s32 4294967295, 3", STORE], 2),
        (["%s4_s1 = ssub.s32 0, 8", "%s5_s1 = sshra.s32 %s4_s1, 1", STORE], (1 << 32) - 4),
        (["%s4_s1 = ssub.s32 0, 8", "%s5_s1 = sshrl.u32 %s4_s1, 28", STORE], 15),
        (["%s5_s1 = smulhi.u32 2863311531, 100", STORE], 66),
        (["%s4_s1 = ssub.s32 0, 8", "%s5_s1 = smin.u32 %s4_s1, 7", STORE], 7),
        (["%s4_s1 = ssub.s32 0, 8 ;; %s3_s1 = smov 3", "%p1_p0 = scmp.lt.s32.totalorder %s4_s1, 7",
          "%s5_s1 = smov (!%p1_p0, %s3_s1), 4", STORE], 3),
        (["%p1_p0 = scmp.lt.s32.totalorder 8, 7", "%s5_s1 = scalar_select %p1_p0, 3, 4", STORE], 4),
        (["%1 = sdivrem.u32 100, 7 /* kRem */", "%s5_s1 = spop.drf %1", STORE], 2),
        (["%1 = sdivrem.u32 100, 7 /* kDivAndRem */", "%s4_s1 = spop.drf %1", "%s5_s1 = spop.drf %1", STORE], 2),
        # In one bundle the new value counts, in whatever order the slots stand.
        (["%s5_s1 = sadd.s32 %s4_s2, 1 ;; %s4_s2 = smov 6", STORE], 7),
        # A phi reads the register that its values share.
        (["%s3_s1 = smov 6", "%s4_s1 = smov 9", "%s5_s1 = sphi %s3_s1, %s4_s1", STORE], 9),
        # Semaphores are signed; what waits for less does not wait.
        (["%1 = vsyncpa [#allocation3], 5", "%2 = vsyncadd [#allocation3], 4294967293", "%3 = vsyncmov [#allocation3]",
          "%s5_s1 = vpop.sfrf %3", STORE], 2),
    ],
)  # fmt: skip
def test_scalar_arithmetic(bundles, value):
    assert value_of(*bundles) == value


def test_what_is_not_understood_is_zero_and_named():
    execution, found = run(program("%s5_s1 = sfrobnicate 1, 2", "%s6_s1 = spop %v7_v0", STORE))
    assert execution.memory.smem[execution.memory.symbol("#allocation9")] == 0
    assert found["assumed"] == {"sfrobnicate ignored: unknown": 1, "spop ignored: a value of the vector unit": 1}


TABLE = "%s5_s0 = inlined_call_operand.smem [shape: u32[43], index: -1, kind: input, shape index: {}]"


def test_operands_in_a_table():
    """As a fusion with dozens of operands gets them."""
    bundles = [
        f"%s4_s1 = smov 3 ;; {TABLE}",
        "%s6_s2 = sld [smem:[%s5_s0 + %s4_s1]] /* operand 3 */",
        "%7 = dma.hbm_to_vmem [thread:$0]  %s6_s2, 16, [#allocation2], [#allocation3]",
        "%8 = dma.done.wait [#allocation3], 16",
    ]
    (operand,) = parse(program(*bundles)).operands.values()
    assert (operand.index, operand.space, operand.dtype, operand.shape) == (-1, "smem", "u32", (43,))
    execution, found = run(program(*bundles))
    assert (found["hbm_bytes"], found["unanswered_waits"]) == (512, 0)
    assert found["assumed"] == {"operands in a table are 0": 1}
    assert not execution.depends_on_unknown(), "where an operand lies does not matter"


TRIPS = "%s1_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input, shape index: {}]"


@pytest.mark.parametrize(
    ("bundles", "depends"),
    [
        ([TRIPS, "%2 = sst [smem:[#allocation9]] %s1_s0"], False),
        ([TRIPS,
          "%p2_p0 = scmp.eq.s32.totalorder %s1_s0, 1", "%3 = sbr.rel (%p2_p0) target bundleno = 9 (0x9), region = 1",
          *["%4 = sfence"] * 7], True),
        # A loop that would never end.
        ([TRIPS, "%p2_p0 = scmp.eq.s32.totalorder %s1_s0, 1",
          "%3 = sbr.rel (%p2_p0) target bundleno = 2 (0x2), region = 1", *["%4 = sfence"] * 4], True),
        (["%s1_s0 = spop %v7_v0", "%p2_p0 = scmp.eq.s32.totalorder %s1_s0, 1",
          "%7 = dma.hbm_to_vmem [thread:$0]  (%p2_p0), 0, 16, [#allocation2], [#allocation3]"], True),
        (["%s1_s0 = inlined_call_operand.hbm [shape: s32[8], index: 0, kind: input, shape index: {}]",
          "%1 = dma.hbm_to_smem [thread:$0]  %s1_s0, 1, [#allocation9], [#allocation3]",
          "%2 = dma.done.wait [#allocation3], 1", "%s5_s1 = sld [smem:[#allocation9 + $0x7]]",
          "%p2_p0 = scmp.eq.s32.totalorder %s5_s1, 1",
          "%7 = dma.hbm_to_vmem [thread:$0]  (%p2_p0), 0, 16, [#allocation2], [#allocation4]"], True),
        (["%s5_s1 = smov 7", STORE], False),
    ],
)  # fmt: skip
def test_whether_the_way_depends_on_what_is_not_known(bundles, depends):
    execution, _ = run(program(*bundles))
    assert execution.depends_on_unknown() is depends


def test_a_kernel_that_is_given_its_operands_depends_on_nothing():
    assert run(GATHER)[0].depends_on_unknown()
    assert not run(GATHER, scalars={0: [3], 1: index()})[0].depends_on_unknown()
    # The first operand says how often, the second one only which rows.
    assert not run(GATHER, scalars={0: [3]})[0].depends_on_unknown()


def test_a_loop_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr("tpu_serve.bench.compiled.execution._BLOCK_LIMIT", 100)
    forever = program(*["%1 = sfence"] * 3, "%3 = sbr.rel target bundleno = 1 (0x1), region = 1", *["%1 = sfence"] * 4)
    with pytest.raises(UnsupportedSchedule, match="no end"):
        run(forever)


def test_matrix_units():
    bundles = ["%1 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v0"] * 4 + [""] * 12
    _, found = run(program(*bundles), "v6e")
    assert (found["matmuls"], found["mxu_busy"]) == (4, 1.0), "4 instructions of 8 cycles on 2 units in 16 cycles"
    assert run(program(*bundles), "v5e")[1]["mxu_busy"] == 1.0, "4 instructions of 16 cycles on 4 units"
    halves = [bundle.replace("bf16", "f32") for bundle in bundles]
    assert run(program(*halves), "v6e")[1]["mxu_busy"] == 0.5, "8 rows instead of 16"
