"""The fused kernel's config by rule: one that `check` accepts wherever there is any, and a reason where there is none."""

import pytest

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
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


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "mode", "rows"),
    [
        (64, 128, 8, "D", 0),
        (128, 128, 8, "D", 32),
        (256, 128, 8, "D", 32),  # 16 rows an expert, rarely more than 24
        (256, 64, 8, "D", 64),
        (256, 16, 4, "D", 128),  # 64 and rarely more than 80
        (256, 8, 4, "D", 0),  # an expert has half of the tokens
        (257, 128, 8, "G", 0),
    ],
)
def test_few_rows_are_picked_out_of_many_tokens(num_tokens, num_experts, top_k, mode, rows):
    config = heuristic(Problem(num_tokens, num_experts, top_k, 2048, 768, 8, "fp8_channel"), TPU7X)
    assert (config.mode, config.compact_rows) == (mode, rows)


def test_widened_weights_are_gathered_from_fewer_tokens_on():
    for num_tokens, mode in ((128, "D"), (256, "G")):
        problem = Problem(num_tokens, 128, 4, 2048, 768, 8, "fp4_block512")
        assert heuristic(problem, TPU7X).mode == mode


def test_a_chip_without_the_arithmetic_is_told_as_a_reason():
    problem = Problem(64, 16, 4, 2048, 768, 4, "fp8_channel")
    with pytest.raises(ValueError, match="v6e has no arithmetic for"):
        heuristic(problem, TPU_CHIPS["v6e"])


def test_what_may_not_be_summed_first_is_refused_for_its_size():
    problem = Problem(32768, 128, 22, 7168, 2048, 2, "fp8_block128", combine_dtype="int8")
    with pytest.raises(ValueError, match="GiB of rows come home"):
        heuristic(problem, TPU7X)
