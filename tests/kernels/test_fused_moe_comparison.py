"""How results are compared with the reference, and that the inputs and cases of the tests are what they say."""

import math
from dataclasses import replace
from typing import Any

import fused_moe_inputs
import numpy as np
import pytest

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2 import cases, reference, tolerance
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import PostNorm, Problem, malformed
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise

SMALL = Problem(12, 6, 3, 40, 24, num_devices=4, format="float32", dtype="float32")
# Comparing.


def test_errors_by_hand() -> None:
    found = tolerance.errors(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    assert found == pytest.approx((0.5 / 4, 0.5 / 5, (9 + 18) / (5 * math.hypot(3, 4.5))))
    assert tolerance.errors(np.zeros(2), np.zeros(2)) == (0, 0, 1)
    assert tolerance.errors(np.ones(2), np.zeros(2))[:2] == (math.inf, math.inf)
    assert tolerance.errors(-np.ones(2), np.ones(2)).cosine == pytest.approx(-1)
    assert tolerance.errors(np.zeros(2), np.ones(2)) == (1, 1, 0)
    for bad in (np.nan, np.inf):
        assert not tolerance.errors(np.array([bad, 1.0]), np.ones(2)).within(tolerance.TOLERANCES["8-bit, dense"])
    with pytest.raises(ValueError, match="shape"):
        tolerance.errors(np.zeros(2), np.zeros((2, 1)))


def test_each_limit_counts() -> None:
    limits = tolerance.Errors(0.1, 0.1, 0.9)
    assert tolerance.Errors(0.1, 0.1, 0.9).within(limits)
    for name, value in (("max_error", 0.2), ("relative_l2", 0.2), ("cosine", 0.8)):
        assert not tolerance.Errors(0.1, 0.1, 0.9)._replace(**{name: value}).within(limits)


@pytest.mark.parametrize(
    ("changes", "is_strict", "expected"),
    [
        ({"format": "float32"}, True, (1e-5, 1e-6, -math.inf)),
        ({"format": "float32", "combine_dtype": "bfloat16"}, True, (1e-2, 4e-3, 0.99999)),
        ({"format": "bfloat16"}, False, (1e-2, 4e-3, 0.99999)),
        ({"format": "w8a16"}, True, (1e-2, 4e-3, 0.99999)),
        ({"format": "int8_channel"}, True, (2e-2, 1e-2, 0.9999)),
        ({"format": "fp8_block512"}, False, (math.inf, 5e-2, 0.998)),
        ({"format": "fp4_block512"}, True, (2e-2, 1e-2, 0.9999)),
        ({"format": "mxfp4"}, True, (1.5e-2, 6e-3, 0.9999)),
        ({"format": "bfloat16", "combine_dtype": "int8"}, True, (2e-2, 2.4e-2, 0.999)),
        ({"format": "fp8_channel", "dispatch_dtype": "int8"}, False, (math.inf, 7e-2, 0.998)),
    ],
)
def test_tolerance_follows_format_and_wires(
    changes: dict[str, Any], is_strict: bool, expected: tuple[float, ...]
) -> None:
    assert tolerance.tolerance(replace(SMALL, **changes), is_strict=is_strict) == pytest.approx(expected)


# Inputs and cases.


@pytest.mark.parametrize("routing", fused_moe_inputs.ROUTINGS)
def test_inputs_are_routed_as_asked(routing: str) -> None:
    problem = Problem(24, 10, 3, 40, 24, num_devices=4)  # three experts a device, the last has one
    inputs = fused_moe_inputs.make(problem, routing=routing)
    ids = inputs.expert_ids
    assert ids.shape == (24, 3)
    assert ids.dtype == np.int32
    assert ids.min() >= -1
    assert ids.max() < 10
    chosen = [row[row >= 0].tolist() for row in ids]
    repeats = sum(len(row) != len(set(row)) for row in chosen)
    expectation = {
        "uniform": (ids >= 0).all() and len(np.unique(ids)) == 10,
        "skewed": (ids >= 0).all() and np.sum(ids == 0) > 2 * np.sum(ids == 9),
        "one expert": len({tuple(row) for row in chosen}) == 1 and len(chosen[0]) == 1,
        "one device": all(row == [9] for row in chosen),
        "idle device": ids.min() == 3,
        "duplicates": repeats == 12,
        "padding": (ids[::3] == -1).all() and (ids[18:] == -1).all() and (ids[[1, 2, 4]] >= 0).all(),
        "partial": 10 < np.sum(ids == -1) < 62,
        "nothing": (ids == -1).all(),
    }
    assert expectation[routing]
    assert routing == "duplicates" or repeats == 0
    lonely = (ids < 0).all(axis=1)
    assert np.isnan(inputs.x[lonely].astype(np.float32)).all() or routing == "partial"
    assert np.isfinite(inputs.x[~lonely].astype(np.float32)).all()
    result = reference.dense(problem, *inputs.arguments)
    assert np.isfinite(result).all()
    assert (result[lonely] == 0).all()


def test_inputs_are_of_order_one_and_the_same_each_time() -> None:
    problem = Problem(
        16, 6, 2, 256, 128, format="int8_channel", gate_up_bias=True, post_norm=PostNorm(1e-6, plus_one=True)
    )
    first, second, other = (fused_moe_inputs.make(problem, seed) for seed in (0, 0, 1))
    assert (first.x == second.x).all()
    assert (first.weights.gate_up == second.weights.gate_up).all()
    assert (first.x != other.x).any()
    assert (first.weights.gate_up != other.weights.gate_up).any()
    assert first.norm_weight is not None
    assert abs(first.norm_weight.mean()) < 0.1  # one is added
    weights = dequantise(first.weights, FORMATS["int8_channel"])
    assert weights.gate_up[:, 1].std() > 1.3 * weights.gate_up[:, 0].std()
    plain = replace(problem, post_norm=None)
    assert 0.3 < reference.dense(plain, *fused_moe_inputs.make(plain).arguments).std() < 3
    with pytest.raises(ValueError, match="sideways"):
        fused_moe_inputs.make(problem, routing="sideways")


@pytest.mark.parametrize("chip", TPU_CHIPS)
def test_cases_are_sound_and_named_apart(chip: str) -> None:
    found = list(cases.problems(chip))
    assert len({case.label for case in found}) == len({case.problem for case in found}) == len(found)
    assert {case.workload for case in found} == set(cases.WORKLOADS)
    assert [case.problem for case in found if malformed(case.problem) is not None] == []
    few = list(cases.problems(chip, ["GPT-OSS-120B"], tokens=[64], device_counts=[8]))
    assert [case.problem.format for case in few] == ["mxfp4" if chip == "tpu7x" else "int8_channel"]
    assert few[0].problem.down_bias
    assert few[0].problem.activation.name == "swigluoai"
    assert list(cases.problems(chip, formats=["float32"])) == []


def test_cases_of_an_unknown_chip_are_refused() -> None:
    with pytest.raises(KeyError, match="v9"):
        list(cases.problems("v9"))
