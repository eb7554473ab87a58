"""Kernels compiled for TPUs that are not here, and their schedules run: against arithmetic, and against published times.

Every report starts a process, since the compiler reads its flags once.
"""

import pytest

from tpu_serve.bench.compiled.report import CompileWorkerFailed, report

pytestmark = pytest.mark.aot

# Wall times of the tiled matrix multiplication on TPU v5e in JAX's documentation, "Matrix Multiplication" under Pallas TPU: side of
# the square matrices, tile (bm, bk, bn), microseconds. They include what the host takes to launch.
SMALL, LARGE = (128, 128, 128), (512, 1024, 1024)
DOCUMENTED = {(1024, LARGE): 127.09, (4096, LARGE): 889.09, (4096, SMALL): 11771.5}


def kernel(found, name):
    """The only kernel whose name starts with `name`, checked for what must never happen."""
    assert found["error"] is None
    (facts,) = [facts for key, facts in found["kernels"].items() if key.startswith(name)]
    assert "error" not in facts, facts
    assert (facts["failed_checks"], facts["unanswered_waits"], facts["assumed"]) == ({}, 0, {})
    return facts


def matmul(side, tile, chip):
    bm, bk, bn = tile
    sizes = {"m": side, "k": side, "n": side, "bm": bm, "bk": bk, "bn": bn}
    found = report("compiled_targets:matmul", sizes, chip, 1, timeout_s=240)
    return found, kernel(found, "matmul")


def test_matmuls_take_the_documented_times():
    modelled = {}
    for (side, tile), _ in DOCUMENTED.items():
        found, facts = matmul(side, tile, "v5e")
        steps = (side // tile[0]) * (side // tile[2])
        inputs = facts["dma"]["hbm-to-vmem"]
        assert facts["matmuls"] == 2 * side**3 // (2 * 16 * 128 * 128), "each multiplies 16 rows by a 128 x 128 unit"
        assert facts["dma"]["vmem-to-hbm"] == {"count": steps, "bytes": 2 * side * side}
        # A block that is the same as in the step before is not copied again.
        most = steps * (side // tile[1]) * 2 * (tile[0] * tile[1] + tile[1] * tile[2])
        assert 4 * side * side <= inputs["bytes"] <= most
        assert (found["argument_bytes"], found["output_bytes"]) == (4 * side * side, 2 * side * side)
        modelled[side, tile] = facts["us"]
    launch = DOCUMENTED[1024, LARGE] - modelled[1024, LARGE]
    assert 90 < launch < 120, "what is left of the smallest one is the host's launch"
    for case, documented in DOCUMENTED.items():
        assert modelled[case] + launch == pytest.approx(documented, rel=0.05), case


def test_matmul_on_larger_matrix_units():
    found, facts = matmul(1024, (256, 512, 512), "v6e")
    assert facts["matmuls"] == 2 * 1024**3 // (2 * 16 * 256 * 256)
    assert found["bound_by"] == "hbm"
    assert 1 < found["ratio"] < 4
    loop = facts["hottest_loop"]
    assert loop["share"] > 0.9
    assert loop["mxu_busy_in_schedule"] == pytest.approx(facts["matmuls"] * 8 / 2 / loop["bundles_executed"], abs=1e-4)
    assert loop["mxu_busy"] < loop["mxu_busy_in_schedule"] < 1
    assert facts["vmem_bytes"] >= 2 * 2 * (256 * 512 + 512 * 512) + 4 * 256 * 512, (
        "two blocks of each input, and the sum"
    )


@pytest.mark.parametrize(("chip", "neighbours"), [("v6e", 3), ("tpu7x", 2)])
def test_remote_copies_have_their_bytes(chip, neighbours):
    rows = 64
    facts = kernel(report("compiled_targets:push", {"rows": rows}, chip, 4, timeout_s=240), "push")
    size = rows * 1024 * 2
    assert (facts["ici_dmas"], facts["ici_bytes"]) == (neighbours, neighbours * size)
    assert (facts["sibling_dmas"], facts["sibling_bytes"]) == (3 - neighbours, (3 - neighbours) * size)
    assert facts["remote_signals"] == 6
    assert facts["peer_bytes"] == 3 * size
    assert facts["stall_peer_us"] > 3 * 1.5, "barrier, data and credits"


def test_trips_follow_the_scalar_operand():
    found = {
        trips: kernel(
            report("compiled_targets:gather", {"trips": trips, "rows": 200}, "v6e", 1, timeout_s=240), "gather"
        )
        for trips in (3, 200)
    }
    few, many = found[3], found[200]
    assert few["bundles"] == many["bundles"]
    loop = many["hottest_loop"]
    assert (few["hottest_loop"]["trips"], loop["trips"]) == (3, 200)
    assert many["bundles_executed"] - few["bundles_executed"] == 197 * loop["bundles"]
    assert many["hbm_bytes"] - few["hbm_bytes"] == 197 * 4096


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_scalars_that_are_copied_piece_by_piece(chip):
    # Too large for XLA to move it out of HBM, where chips count addresses in different units.
    sizes = {"starts": [159999, 2, 17, 2], "rows": 160000, "counts": {159999: 4, 17: 1, 2: 6}}
    facts = kernel(report("compiled_targets:windows", sizes, chip, 1, timeout_s=240), "windows")
    assert facts["dma"]["hbm-to-smem"]["count"] >= 4
    assert 4 + 6 + 1 + 6 in [loop["trips"] for loop in facts["loops"]]


def test_unknown_scalars_are_named():
    found = report("compiled_targets:gather", {"trips": 3, "rows": 16, "known": False}, "v5e", 1, timeout_s=240)
    (facts,) = [facts for name, facts in found["kernels"].items() if name.startswith("gather")]
    assert facts["assumed"] == {"operand 0 is 0": 1, "operand 1, copied into SMEM, is 0": 1}
    assert facts["hottest_loop"] is None


def test_refusals_are_one_line():
    found = report("compiled_targets:too_large", {}, "v6e", 1, timeout_s=240)
    assert "268435456" in found["error"]
    assert "vmem" in found["error"].lower()
    assert "\n" not in found["error"]
    assert (found["kernels"], found["modelled_us"]) == ({}, None)


def test_named_scopes(tmp_path):
    facts = kernel(report("compiled_targets:scoped", {}, "v6e", 1, 240, scopes=True, dump_folder=tmp_path), "scoped")
    assert facts["scopes"]["doubling"]["calls"] == 1
    assert (tmp_path / "hlo.txt").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [("compiled_targets:not_a_program", "instead of a Program"), ("compiled_targets:missing", "has no attribute")],
)
def test_wrong_targets_are_explained(target, words):
    with pytest.raises(CompileWorkerFailed, match=words):
        report(target, {}, "v6e", 1, timeout_s=240)


def test_time_limit():
    found = report("compiled_targets:scoped", {}, "v6e", 1, timeout_s=0.2)
    assert (found["error"], found["kernels"], found["modelled_us"]) == ("no answer after 0.2 s", {}, None)
