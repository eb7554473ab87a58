"""What must hold of the fused mixture-of-experts kernel whatever the shapes: bad values stay where they belong, results repeat."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from fused_moe_driver import Layer, compare, on_devices, padded_arguments
from fused_moe_inputs import Inputs, make

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2 import reference, tolerance
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import PostNorm, Problem
from tpu_serve.kernels.fused_moe_v2.tile import quantise_rows

pytestmark = pytest.mark.usefixtures("plain_sums")

D, G = Config("D", 128, 2), Config("G", 128, 2, block_rows=32, tile_rows=32)
COMPACT = replace(D, compact_rows=32)
DEDUP = replace(G, dispatch="dedup_push", rounds=2)
SUMMED = replace(G, combine="rs")

SMALL = Problem(10, 6, 2, 128, 256, 2)
CONFINING = {
    "mode D": (replace(SMALL, down_bias=True), D),
    "mode D, post norm": (replace(SMALL, post_norm=PostNorm(1e-3)), D),
    "mode D, 8 bits": (replace(SMALL, format="int8_channel", combine_dtype="int8"), D),
    "mode D, picked rows": (replace(SMALL, down_bias=True), COMPACT),
    "mode D, picked rows, post norm": (replace(SMALL, post_norm=PostNorm(1e-3), scale_on_input=True), COMPACT),
    "mode D, picked rows, 8 bits": (replace(SMALL, format="int8_channel", combine_dtype="int8"), COMPACT),
    "mode G": (replace(SMALL, down_bias=True), DEDUP),
    "mode G, summed and scattered": (replace(SMALL, scale_on_input=True), SUMMED),
    "mode G, 8 bits": (replace(SMALL, format="int8_channel", dispatch_dtype="int8", combine_dtype="int8"), G),
}


def spoilt_token(inputs: Inputs) -> tuple[Inputs, np.ndarray]:
    """NaN in one token and an infinity in another; and bool[T], which tokens that concerns."""
    x = inputs.x.copy()
    x[3, 7], x[4, 0] = np.nan, np.inf
    concerned = np.zeros(len(x), bool)
    concerned[3:5] = True
    return replace(inputs, x=x), concerned


def spoilt_expert(inputs: Inputs, field: str, expert: int, value: float) -> tuple[Inputs, np.ndarray]:
    """A bad value in one array of one expert; and bool[T], which tokens are routed there."""
    array: Any = np.array(getattr(inputs.weights, field))
    array[expert].reshape(-1)[:: array[expert].size // 5] = value
    concerned = (inputs.expert_ids == expert).any(axis=1)
    return replace(inputs, weights=replace(inputs.weights, **{field: array})), concerned


@pytest.mark.parametrize("name", CONFINING)
def test_bad_values_stay_in_the_tokens_concerned_and_leave_nothing_behind(name):
    problem, config = CONFINING[name]
    layer, inputs = Layer(problem, config), make(problem, routing="partial")
    clean, same = layer.run(inputs)
    np.testing.assert_array_equal(same, clean)
    scaled = problem.weights.scaled
    up, down = ("gate_up_scale", "down_scale") if scaled else ("gate_up", "down")
    spoilt = {
        "a token": spoilt_token(inputs),
        "first product": spoilt_expert(inputs, up, 2, np.inf),
        "second product": spoilt_expert(inputs, down, 3, np.nan),
    }
    if problem.down_bias:
        spoilt["bias"] = spoilt_expert(inputs, "down_bias", 5, np.inf)
    for what, (bad, concerned) in spoilt.items():
        assert concerned.any(), what
        assert not concerned.all(), what
        (result,) = layer.run(bad, ("eager",), allow_nan=True)
        np.testing.assert_array_equal(result[~concerned], clean[~concerned], err_msg=what)
        if not scaled:  # 8-bit rows without a finite maximum are zeros
            assert not np.isfinite(result[concerned & (bad.expert_ids >= 0).any(axis=1)]).all(axis=1).any(), what
    (again,) = layer.run(inputs, ("eager",))
    np.testing.assert_array_equal(again, clean)


def test_devices_mode_and_schedule_do_not_matter():
    whole = Problem(13, 6, 3, 200, 256, 1, format="float32", dtype="float32", down_bias=True)
    inputs, first = make(whole), None
    for num_devices, config in ((1, D), (2, DEDUP), (3, D), (1, replace(G, tile_columns=256))):
        problem = replace(whole, num_devices=num_devices)  # 6 experts are no padding on any of them
        (result,) = Layer(problem, config).run(inputs, ("on_wait",))
        first = result if first is None else first
        compare(problem, config, inputs, result, f"{num_devices} devices, {config}")
        found = tolerance.errors(result, first)
        assert found.within(tolerance.TOLERANCES["float32"]), f"{num_devices} devices, {config}: {found}"


def test_routing_weights_keep_their_32_bits():
    """A result near 0 that only their last bits decide: the weights of two equal experts all but cancel each other."""
    problem = Problem(4, 2, 2, 128, 128, 1, format="float32", dtype="float32")
    for config in (D, G):
        inputs = make(problem)
        weights = replace(inputs.weights, gate_up=inputs.weights.gate_up[[0, 0]], down=inputs.weights.down[[0, 0]])
        shares = np.tile(np.float32([1.0009765625, -1.0]), (4, 1))
        inputs = replace(inputs, weights=weights, routing_weights=shares, expert_ids=np.tile(np.int32([0, 1]), (4, 1)))
        alone = replace(inputs, routing_weights=np.tile(np.float32([0.0009765625, 0]), (4, 1)))
        (result,) = Layer(problem, config).run(inputs, ("eager",))
        found = tolerance.errors(result, reference.dense(problem, *alone.arguments))
        assert found.relative_l2 < 1e-3, (config, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((9, 128), "bfloat16")}, r"x is \(\(9, 128\), 'bfloat16'\), the problem asks for \(\(10, 128\), 'bfloat16'\)"),
        ({"x": np.zeros((10, 128), np.float32)}, "x is .*float32.* asks for .*bfloat16"),
        ({"expert_ids": np.zeros((10, 3), np.int32)}, "expert_ids is"),
        ({"norm_weight": np.ones(128, np.float32)}, "norm_weight is .* the problem asks for None"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_the_problem_are_refused(change, message):
    problem = replace(SMALL, num_devices=1)
    inputs = replace(make(problem), **change)
    with pytest.raises(ValueError, match=message):
        on_devices(problem, D, False, padded_arguments(problem, inputs))


def test_weights_that_do_not_fit_the_problem_are_refused():
    problem = replace(SMALL, num_devices=1)
    inputs = make(problem)
    for change, message in (
        ({"format": "fp8_channel"}, "gate_up is .*bfloat16.* asks for .*float8_e4m3fn"),
        ({"intermediate": 300}, "gate_up is"),
        ({"gate_up_bias": True}, "gate_up_bias is None"),
        ({"down_bias": True}, "down_bias is None"),
        ({"post_norm": PostNorm(1e-5)}, "norm_weight is None"),
    ):
        with pytest.raises(ValueError, match=message):
            on_devices(replace(problem, **change), D, False, padded_arguments(problem, inputs))


def test_an_illegal_config_is_refused_before_anything_is_traced():
    inputs = make(SMALL)
    with pytest.raises(ValueError, match="tile_columns 192 must be a multiple of 128"):
        on_devices(SMALL, replace(D, tile_columns=192), False, padded_arguments(SMALL, inputs))
    call = Call("model", TPU_CHIPS["v5e"])
    with pytest.raises(ValueError, match="v5e has no arithmetic for"):
        fused_moe_v2(*inputs.arguments, problem=replace(SMALL, format="fp8_channel"), config=D, call=call)


@pytest.mark.parametrize("dtype", ROW_LIMITS)
def test_rows_without_a_usable_scale_are_zeros(dtype):
    """Powers of two from below what float32 holds to beyond it, zeros and NaN: the row as a whole, never NaN in the result."""
    largest = np.float32(2.0) ** np.arange(-149, 128, dtype=np.float32)
    rows = np.linspace(-1, 1, 64, dtype=np.float32) * np.concatenate([largest, [0, np.inf, np.nan]])[:, None]
    rows = rows.astype(np.float32)
    values, scale = jax.jit(lambda x: quantise_rows(x, dtype))(rows)
    found = np.asarray(values).astype(np.float64) * np.asarray(scale)
    np.testing.assert_array_equal(found, reference.rounded(rows, dtype))


@pytest.mark.parametrize("dtype", ROW_LIMITS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_makes_zeros_of_its_row_only(dtype, value):
    """In as many rows as are reduced several at a time, where a maximum may lose a NaN."""
    rows = np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32)
    rows[[3, 20], [5, 255]] = value
    values, scale = jax.jit(lambda x: quantise_rows(x, dtype))(rows)
    found = np.asarray(values).astype(np.float64) * np.asarray(scale)
    np.testing.assert_allclose(found, reference.rounded(rows, dtype), rtol=1e-6)
    assert not found[[3, 20]].any()
