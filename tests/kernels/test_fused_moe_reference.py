"""The reference of the fused kernel, rule by rule against numbers worked out by hand, and the inputs and cases that go with it."""

import math
from dataclasses import replace
from typing import Any

import fused_moe_inputs
import numpy as np
import pytest

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import reference, tolerance
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise, quantise

SMALL = Problem(12, 6, 3, 40, 24, num_devices=4, format="float32", dtype="float32")


def experts(gate: Any, up: Any, down: Any, **biases: Any) -> Any:
    """Float32 weights from gate and up [E, H, I] and down [E, I, H]; biases gate_bias, up_bias [E, I] and down_bias [E, H]."""
    arrays = {name: np.asarray(value, np.float32) for name, value in biases.items()}
    gate_up_bias = None
    if "gate_bias" in arrays:
        gate_up_bias = np.stack([arrays["gate_bias"], arrays["up_bias"]], axis=1)[:, :, None]
    down_bias = arrays["down_bias"][:, None] if "down_bias" in arrays else None
    gate_up = np.stack([np.asarray(gate, np.float32), np.asarray(up, np.float32)], axis=1)
    return ExpertWeights(gate_up, np.asarray(down, np.float32), gate_up_bias=gate_up_bias, down_bias=down_bias)


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def one_by_one(**changes: Any) -> Problem:
    """H = I = 1, one token with two choices among three experts."""
    return replace(Problem(1, 3, 2, 1, 1, format="float32", dtype="float32"), **changes)


SCALARS = experts([[[2.0]], [[0.5]], [[-1.0]]], [[[3.0]], [[1.0]], [[5.0]]], [[[0.5]], [[-2.0]], [[7.0]]])


def scalar(problem: Problem, x: float, ids: list[int], shares: list[float], weights: Any = SCALARS) -> float:
    result = reference.dense(problem, np.array([[x]]), np.array([ids]), np.array([shares]), weights)
    assert result.shape == (1, 1)
    assert result.dtype == np.float32
    return float(result[0, 0])


def test_plain_layer_equals_an_einsum() -> None:
    inputs = fused_moe_inputs.make(SMALL)
    weights = inputs.weights
    gate, up = (np.asarray(weights.gate_up, np.float64)[:6, half, :40, :24] for half in (0, 1))
    down = np.asarray(weights.down, np.float64)[:6, :24, :40]
    share = np.einsum("tk,tke->te", inputs.routing_weights, np.eye(6)[inputs.expert_ids])
    gated, other = np.einsum("th,ehi->tei", inputs.x, gate), np.einsum("th,ehi->tei", inputs.x, up)
    expected = np.einsum("tei,eih,te->th", gated / (1 + np.exp(-gated)) * other, down, share)
    np.testing.assert_allclose(reference.dense(SMALL, *inputs.arguments), expected, rtol=1e-6, atol=1e-6)


def test_two_choices_by_hand() -> None:
    first, third = silu(2 * 1.5) * 3 * 1.5 * 0.5, silu(-1.5) * 5 * 1.5 * 7
    assert scalar(one_by_one(), 1.5, [0, 2], [0.25, 0.75]) == pytest.approx(0.25 * first + 0.75 * third)
    assert scalar(one_by_one(), 1.5, [2, 0], [0.75, 0.25]) == pytest.approx(0.25 * first + 0.75 * third)


@pytest.mark.parametrize("gate", [-20.0, -1.5, 0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("up", [-9.0, -0.5, 0.0, 8.5])
def test_activations_by_their_formulas(gate: float, up: float) -> None:
    expected = {
        "silu": silu(gate) * up,
        "gelu": 0.5 * gate * math.erfc(-gate / 2**0.5) * up,
        "gelu_tanh": 0.5 * gate * (1 + math.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate * gate * gate))) * up,
        "swigluoai": (max(-7.0, min(7.0, up)) + 1) * min(gate, 7.0) / (1 + math.exp(-1.702 * min(gate, 7.0))),
    }
    for name, value in expected.items():
        found = reference.activate(Activation(name), np.array([[gate]]), np.array([[up]]))
        assert found[0, 0] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_clamp_and_slope_of_swigluoai_are_parameters() -> None:
    found = reference.activate(Activation("swigluoai", limit=2.0, alpha=1.0), np.array([[3.0]]), np.array([[-5.0]]))
    assert found[0, 0] == pytest.approx((-2 + 1) * silu(2.0))


def test_activations_are_those_of_the_problem() -> None:
    with pytest.raises(ValueError, match="relu"):
        reference.activate(Activation("relu"), np.zeros((1, 1)), np.zeros((1, 1)))
    found = scalar(one_by_one(activation=Activation("gelu")), 1.0, [0, -1], [1.0, 0.0])
    assert found == pytest.approx(0.5 * 2 * math.erfc(-(2**0.5)) * 3 * 0.5)


def test_biases_come_before_the_activation_and_before_the_routing_weight() -> None:
    problem = Problem(1, 1, 1, 1, 1, format="float32", dtype="float32", gate_up_bias=True, down_bias=True)
    problem = replace(problem, activation=Activation("swigluoai"))
    weights = experts([[[1.0]]], [[[1.0]]], [[[2.0]]], gate_bias=[[3.0]], up_bias=[[-9.0]], down_bias=[[0.25]])
    gate, up = 7.0, -4.0  # 5 + 3 is clamped, 5 - 9 is not
    expected = 0.5 * (2 * (up + 1) * gate / (1 + math.exp(-1.702 * gate)) + 0.25)
    assert scalar(problem, 5.0, [0], [0.5], weights) == pytest.approx(expected)


def test_a_bias_that_only_one_side_knows_of_is_refused() -> None:
    with pytest.raises(ValueError, match="down_bias"):
        scalar(one_by_one(down_bias=True), 1.0, [0, 1], [0.5, 0.5])


NORM = Problem(1, 1, 1, 2, 1, format="float32", dtype="float32", post_norm=PostNorm(0.0))
TWO = experts([[[1.0], [0.0]]], [[[1.0], [0.0]]], [[[3.0, 4.0]]])
TWO_X, TWO_IDS, TWO_SHARES = np.array([[1.0, 0.0]]), np.array([[0]]), np.array([[0.5]])


def test_post_norm_normalises_before_it_scales_and_weights() -> None:
    norm_weight = np.array([2.0, -1.0])
    found = reference.dense(NORM, TWO_X, TWO_IDS, TWO_SHARES, TWO, norm_weight)
    root = math.sqrt((9 + 16) / 2)  # the row is a positive multiple of (3, 4), and its length goes
    np.testing.assert_allclose(found, [[0.5 * 2 * 3 / root, 0.5 * -1 * 4 / root]], rtol=1e-6)
    scaled_first = math.sqrt((36 + 16) / 2)
    assert abs(found[0, 0] - 0.5 * 6 / scaled_first) > 0.1
    plus_one = replace(NORM, post_norm=PostNorm(0.0, plus_one=True))
    found = reference.dense(plus_one, TWO_X, TWO_IDS, TWO_SHARES, TWO, norm_weight)
    np.testing.assert_allclose(found, [[0.5 * 3 * 3 / root, 0.0]], rtol=1e-6)


def test_post_norm_adds_epsilon_to_the_mean_square_of_true_columns() -> None:
    problem = replace(NORM, post_norm=PostNorm(2.0))
    size = silu(1.0)
    expected = [[0.5 * part * size / math.sqrt(12.5 * size**2 + 2.0) for part in (3, 4)]]
    found = reference.dense(problem, TWO_X, TWO_IDS, TWO_SHARES, TWO, np.ones(2))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    padded = ExpertWeights(
        np.pad(TWO.gate_up, [(0, 0), (0, 0), (0, 126), (0, 127)]), np.pad(TWO.down, [(0, 0), (0, 127), (0, 126)])
    )
    wide_x, wide_norm = (
        np.pad(TWO_X, [(0, 0), (0, 126)], constant_values=9.0),
        np.pad(np.ones((1, 2)), [(0, 0), (0, 126)]),
    )
    found = reference.dense(problem, wide_x, TWO_IDS, TWO_SHARES, padded, wide_norm)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_post_norm_comes_after_the_down_bias() -> None:
    problem = replace(NORM, down_bias=True)
    weights = experts([[[1.0], [0.0]]], [[[1.0], [0.0]]], [[[0.0, 0.0]]], down_bias=[[30.0, 40.0]])
    found = reference.dense(problem, TWO_X, TWO_IDS, TWO_SHARES, weights, np.ones(2))
    np.testing.assert_allclose(found, [[0.5 * 3 / math.sqrt(12.5), 0.5 * 4 / math.sqrt(12.5)]], rtol=1e-6)


def test_a_norm_needs_its_weight() -> None:
    with pytest.raises(ValueError, match="must be given"):
        reference.dense(NORM, TWO_X, TWO_IDS, TWO_SHARES, TWO)
    with pytest.raises(ValueError, match="must not be given"):
        reference.dense(replace(NORM, post_norm=None), TWO_X, TWO_IDS, TWO_SHARES, TWO, np.ones(2))


def test_routing_weight_on_the_input() -> None:
    problem = one_by_one(scale_on_input=True)
    expected = silu(2 * 0.25 * 1.5) * 3 * 0.25 * 1.5 * 0.5 + silu(-0.5 * 1.5) * 5 * 0.5 * 1.5 * 7
    assert scalar(problem, 1.5, [0, 2], [0.25, 0.5]) == pytest.approx(expected)


def test_routing_weight_on_the_input_leaves_biases_alone() -> None:
    problem = Problem(
        1, 1, 1, 1, 1, format="float32", dtype="float32", scale_on_input=True, gate_up_bias=True, down_bias=True
    )
    weights = experts([[[1.0]]], [[[1.0]]], [[[2.0]]], gate_bias=[[0.5]], up_bias=[[-3.0]], down_bias=[[0.25]])
    assert scalar(problem, 4.0, [0], [0.5], weights) == pytest.approx(2 * silu(2.5) * (2.0 - 3.0) + 0.25)


def test_duplicate_choices_are_summed() -> None:
    on_output = 0.75 * silu(3.0) * 4.5 * 0.5
    assert scalar(one_by_one(), 1.5, [0, 0], [0.25, 0.5]) == pytest.approx(on_output)
    on_input = silu(0.75 * 3.0) * 0.75 * 4.5 * 0.5
    assert scalar(one_by_one(scale_on_input=True), 1.5, [0, 0], [0.25, 0.5]) == pytest.approx(on_input)


def test_no_expert_means_nothing_whatever_the_weight_or_the_row() -> None:
    assert scalar(one_by_one(), 1.5, [-1, 0], [9.0, 0.5]) == pytest.approx(0.5 * silu(3.0) * 4.5 * 0.5)
    assert scalar(one_by_one(), math.nan, [-1, -1], [0.5, 0.5]) == 0.0
    assert scalar(one_by_one(), math.nan, [0, 1], [0.0, 0.0]) == 0.0
    for wrong in (3, -2):
        with pytest.raises(ValueError, match="expert ids"):
            scalar(one_by_one(), 1.0, [0, wrong], [0.5, 0.5])


def test_infinities_stay_in_their_token() -> None:
    inputs = fused_moe_inputs.make(SMALL)
    clean = reference.dense(SMALL, *inputs.arguments)
    inputs.x[3], inputs.x[7, 2] = np.nan, np.inf
    dirty = reference.dense(SMALL, *inputs.arguments)
    others = [token for token in range(12) if token not in (3, 7)]
    assert (dirty[others] == clean[others]).all()
    assert np.isnan(dirty[3]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_weights_count_as_what_they_are_restored_to(name: str) -> None:
    problem = replace(SMALL, format=name, hidden=140, intermediate=136, gate_up_bias=True, down_bias=True)
    inputs = fused_moe_inputs.make(problem)
    plain = replace(problem, format="float32")
    expected = reference.dense(plain, *replace(inputs, weights=dequantise(inputs.weights, FORMATS[name])).arguments)
    assert (reference.dense(problem, *inputs.arguments) == expected).all()


@pytest.mark.parametrize("devices", [1, 3, 6, 8])
def test_dense_does_not_depend_on_the_number_of_devices(devices: int) -> None:
    problem = replace(SMALL, num_experts=8, num_devices=devices)
    inputs = fused_moe_inputs.make(problem)
    alone = replace(problem, num_devices=1)
    expected = reference.dense(alone, *fused_moe_inputs.make(alone).arguments)
    np.testing.assert_allclose(reference.dense(problem, *inputs.arguments), expected, rtol=1e-5, atol=1e-6)


# Rounding.


def test_strict_float32_is_dense() -> None:
    for mode in "DG":
        for routing in fused_moe_inputs.ROUTINGS:
            inputs = fused_moe_inputs.make(SMALL, routing=routing)
            exact = reference.dense(SMALL, *inputs.arguments)
            found = reference.strict(SMALL, *inputs.arguments, tile_columns=128, mode=mode)
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


def test_strict_tends_to_dense_as_precision_grows() -> None:
    distance = {}
    for name in ("fp8_channel", "int8_channel", "bfloat16", "float32"):
        problem = Problem(32, 8, 2, 256, 256, num_devices=2, format=name, dtype="float32")
        inputs = fused_moe_inputs.make(problem)
        exact = reference.dense(problem, *inputs.arguments)
        found = tolerance.errors(reference.strict(problem, *inputs.arguments, tile_columns=128), exact)
        assert found.within(tolerance.tolerance(problem, is_strict=False)), (name, found)
        distance[name] = found.relative_l2
    assert distance["float32"] < 1e-6 < 1e-3 < distance["bfloat16"]
    assert 2 * distance["bfloat16"] < distance["int8_channel"]
    assert 2 * distance["int8_channel"] < distance["fp8_channel"]


@pytest.mark.parametrize(
    ("dtype", "row", "stored"),
    [
        ("int8", [127.0, 1.4, -2.5, -3.5], [127.0, 1.0, -2.0, -4.0]),
        ("int8", [-63.5, 1.4, 1.3, 0.2], [-63.5, 1.5, 1.5, 0.0]),
        ("float8_e4m3fn", [448.0, 17.0, 19.0, -21.1], [448.0, 16.0, 20.0, -22.0]),
        ("float8_e4m3fn", [-7.0, 1.0625, 0.0, 1.1875], [-7.0, 1.0, 0.0, 1.25]),
        ("bfloat16", [1.00390625, 1.01171875, 3.0, -256.9], [1.0, 1.015625, 3.0, -256.0]),
        ("float32", [1.00390625, 1e-30, 3.0, 0.1], [1.00390625, 1e-30, 3.0, 0.1]),
    ],
)
def test_rounding_of_a_row(dtype: str, row: list[float], stored: list[float]) -> None:
    np.testing.assert_allclose(reference.rounded(np.array([row]), dtype), [stored], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_rows_that_cannot_be_scaled_become_zeros(dtype: str) -> None:
    ordinary = [1.0, -1.0, 0.5]
    rows = np.array([[0.0, 0.0, 0.0], [np.nan, 1.0, 2.0], [1.0, np.inf, 2.0], [1e-40, 0.0, 0.0], ordinary])
    found = reference.rounded(rows, dtype)
    assert (found[:4] == 0).all()
    np.testing.assert_allclose(found[4], ordinary, atol=0.005)
    grouped = reference.rounded(rows[1:2], dtype, 1)  # only the group with the NaN
    np.testing.assert_allclose(grouped, [[0.0, 1.0, 2.0]], rtol=1e-6)


def identity(size: int) -> Any:
    """One expert that squares each column of a token, as long as it is so large that silu changes nothing."""
    return experts([np.eye(size)], [np.eye(size)], [np.eye(size)])


def test_rows_are_quantised_whole_and_inner_values_by_tile() -> None:
    problem = Problem(1, 1, 1, 4, 4, format="int8_channel", dtype="float32")
    weights = quantise(identity(4), FORMATS["int8_channel"])
    x = np.array([[127.0, 40.4, 100.0, 30.0]])  # all so large that silu(v) = v
    ids, shares = np.array([[0]]), np.array([[1.0]])
    row = np.array([127.0, 40.0, 100.0, 30.0]) ** 2
    by_two = [row[0], round(row[1] / row[0] * 127) * row[0] / 127, row[2], round(row[3] / row[2] * 127) * row[2] / 127]
    found = reference.strict(problem, x, ids, shares, weights, tile_columns=2)
    np.testing.assert_allclose(found, [by_two], rtol=1e-5)
    whole = np.round(row / row[0] * 127) * row[0] / 127
    found = reference.strict(problem, x, ids, shares, weights, tile_columns=128)
    np.testing.assert_allclose(found, [whole], rtol=1e-5)
    assert np.abs(whole - by_two).max() > 1


def test_formats_with_group_scales_quantise_by_128_columns_both_times() -> None:
    problem = Problem(1, 1, 1, 256, 256, format="fp8_block128", dtype="float32")
    weights = quantise(identity(256), FORMATS["fp8_block128"])
    x = np.full((1, 256), 30.0)
    x[0, 0], x[0, 128], x[0, 255] = 448.0, 61.0, 31.5
    ids, shares = np.array([[0]]), np.array([[1.0]])
    rows = np.concatenate(
        [reference.rounded(x[:, :128], "float8_e4m3fn"), reference.rounded(x[:, 128:], "float8_e4m3fn")], 1
    )
    inner = rows**2
    inner = np.concatenate(
        [reference.rounded(inner[:, :128], "float8_e4m3fn"), reference.rounded(inner[:, 128:], "float8_e4m3fn")], 1
    )
    for tile_columns in (64, 256):
        found = reference.strict(problem, x, ids, shares, weights, tile_columns=tile_columns)
        np.testing.assert_allclose(found, inner, rtol=1e-5)
    per_row = quantise(identity(256), FORMATS["fp8_channel"])
    found = reference.strict(replace(problem, format="fp8_channel"), x, ids, shares, per_row, tile_columns=256)
    assert np.abs(found - inner).max() > 1


def test_bfloat16_formats_round_rows_and_inner_values() -> None:
    problem = Problem(1, 1, 1, 1, 1, format="bfloat16", dtype="float32")
    weights = quantise(identity(1), FORMATS["bfloat16"])
    x, ids, shares = np.array([[65.3]]), np.array([[0]]), np.array([[1.0]])
    # 65.3 becomes 65.5 (steps of 1/2), whose square 4290.25 becomes 4288 (steps of 32).
    assert reference.strict(problem, x, ids, shares, weights, tile_columns=128)[0, 0] == 4288.0
    assert reference.dense(problem, x, ids, shares, weights)[0, 0] == pytest.approx(65.3**2)


WIRED = Problem(16, 6, 3, 256, 256, num_devices=4, format="fp8_channel", dtype="float32")


def strict_of(problem: Problem, mode: str = "D") -> np.ndarray:
    return reference.strict(problem, *fused_moe_inputs.make(problem).arguments, tile_columns=128, mode=mode)


def test_rows_that_travel_as_they_are_multiplied_are_quantised_once() -> None:
    same = replace(WIRED, dispatch_dtype="float8_e4m3fn")
    assert (strict_of(same) == strict_of(WIRED)).all()
    for other in ({"dispatch_dtype": "int8"}, {"format": "fp8_block128", "dispatch_dtype": "float8_e4m3fn"}):
        twice = replace(WIRED, **other)
        assert (strict_of(twice) != strict_of(replace(twice, dispatch_dtype=None))).any()


def test_dispatch_rounds_tokens() -> None:
    problem = replace(SMALL, dispatch_dtype="int8")
    inputs = fused_moe_inputs.make(problem)
    arrived = replace(inputs, x=reference.rounded(inputs.x, "int8"))
    found = reference.strict(problem, *inputs.arguments, tile_columns=128)
    np.testing.assert_allclose(found, reference.dense(SMALL, *arrived.arguments), rtol=1e-5, atol=1e-6)


# Four experts on two devices. With x = 64, silu(64) = 64 and 64 * 64 = 2^12, so expert e returns 2^12 times its last factor.
FOUR = experts([[[1.0]]] * 4, [[[1.0]]] * 4, [[[2.0**-12 * part]] for part in (1.0, 2.0**-9, 1.0, 3 * 2.0**-9)])
FOUR_IDS, FOUR_SHARES = np.array([[0, 1, 2, 3]]), np.ones((1, 4))


def combined(mode: str, shares: np.ndarray = FOUR_SHARES, **changes: Any) -> float:
    problem = replace(Problem(1, 4, 4, 1, 1, num_devices=2, format="float32", dtype="float32"), **changes)
    found = reference.strict(problem, np.array([[64.0]]), FOUR_IDS, shares, FOUR, tile_columns=128, mode=mode)
    return float(found[0, 0])


def test_mode_d_rounds_each_devices_sum() -> None:
    # bfloat16 has steps of 2^-7 above 1: 1 + 2^-9 becomes 1, and 1 + 3 * 2^-9 becomes 1 + 2^-7.
    assert combined("D") == 2 + 4 * 2**-9
    assert combined("D", combine_dtype="bfloat16") == 2 + 2**-7
    assert combined("D", combine_dtype="bfloat16", num_devices=4) == 2 + 2**-7


def test_mode_g_rounds_rows_before_they_are_weighted() -> None:
    assert combined("G", combine_dtype="bfloat16") == 2 + 2**-7
    third = np.array([[1.0, 0.0, 1 / 3, 0.0]])
    assert combined("G", third, combine_dtype="bfloat16") == pytest.approx(4 / 3, rel=1e-7)
    assert combined("D", third, combine_dtype="bfloat16") == 1 + 0.333984375
    with pytest.raises(ValueError, match="mode"):
        combined("X")


def test_eight_bit_results_have_a_scale_per_row() -> None:
    for mode in "DG":
        problem = replace(WIRED, format="float32", combine_dtype="int8")
        error = tolerance.errors(strict_of(problem, mode), strict_of(replace(problem, combine_dtype=None), mode))
        assert 3e-3 < error.relative_l2 < 2e-2
        assert error.within(tolerance.TOLERANCES["8-bit wire"])


def test_finished_rows_are_gathered_in_their_own_type_and_rounded_to_the_problems() -> None:
    plain = replace(WIRED, format="float32", sequence_parallel=False)
    exact = strict_of(plain)
    gathered = strict_of(replace(plain, output_gather_dtype="int8"))
    np.testing.assert_allclose(gathered, reference.rounded(exact, "int8"), rtol=1e-5, atol=1e-5)
    found = strict_of(replace(WIRED, format="bfloat16", dtype="bfloat16"))
    assert (found == found.astype(np.dtype("bfloat16")).astype(np.float32)).all()
