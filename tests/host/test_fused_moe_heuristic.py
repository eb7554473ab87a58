"""The fused kernel's config by rule: one that `check` accepts wherever there is any, and a reason where there is none."""

import pytest

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.heuristic import candidates, heuristic
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.kernels.fused_moe_v2.problem import Problem

TPU7X = TPU_CHIPS["tpu7x"]
FOUND = {
    "sums too long for mode D": (Problem(200, 64, 6, 16384, 2048, 32, sequence_parallel=False), None, ("G", "push")),
    "more than pushes bring home": (Problem(32768, 128, 10, 7168, 2048, 2, "fp8_block128"), None, ("G", "rs")),
    "96 rows do not fit": (Problem(70, 8, 8, 16384, 2048, 6), "G", ("G", "push")),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_legal_config_is_found(name):
    problem, mode, expected = FOUND[name]
    config = heuristic(problem, TPU7X, mode)
    assert check(problem, config, TPU7X) is None
    assert (config.mode, config.combine) == expected


def test_a_chip_without_the_arithmetic_is_told_as_a_reason():
    problem = Problem(64, 16, 4, 2048, 768, 4, "fp8_channel")
    with pytest.raises(ValueError, match="v6e has no arithmetic for"):
        heuristic(problem, TPU_CHIPS["v6e"])
    assert not list(candidates(problem, TPU_CHIPS["v6e"]))


def test_what_may_not_be_summed_first_is_refused_for_its_size():
    problem = Problem(32768, 128, 22, 7168, 2048, 2, "fp8_block128", combine_dtype="int8")
    with pytest.raises(ValueError, match="GiB of rows come home"):
        heuristic(problem, TPU7X)
