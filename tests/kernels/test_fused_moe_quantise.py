"""Number formats of expert weights: values, scales, padding, and the way from one format to another."""

import bisect
import math
from typing import Any

import numpy as np
import pytest

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import quantise as q
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS, Format
from tpu_serve.kernels.fused_moe_v2.problem import Problem

SCALED = [name for name, form in FORMATS.items() if form.scaled]
FLOATS = {"float8_e4m3fn": (4, 3, 7, 448.0), "float4_e2m1fn": (2, 1, 1, 6.0)}
"""Exponent bits, mantissa bits, exponent bias and largest value, from the types' definitions."""


def random_weights(hidden: int, intermediate: int, num_experts: int = 3, seed: int = 0, biases: bool = False) -> Any:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * np.exp2(random.integers(-6, 3, size=shape))).astype(np.float32)

    return ExpertWeights(
        normal(num_experts, 2, hidden, intermediate),
        normal(num_experts, intermediate, hidden),
        gate_up_bias=normal(num_experts, 2, 1, intermediate) if biases else None,
        down_bias=normal(num_experts, 1, hidden) if biases else None,
    )


def values_of(dtype: str) -> list[float]:
    """All values from 0 up, in order, so that a value's index is its bits."""
    if dtype == "int8":
        return [float(value) for value in range(128)]
    _, mantissa_bits, bias, largest = FLOATS[dtype]
    values, bits = [], 0
    while True:
        exponent, mantissa = divmod(bits, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        value = math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias)
        if value > largest:
            return values
        values.append(value)
        bits += 1


def nearest(value: float, values: list[float]) -> float:
    """Ties go to even bits; beyond the last value lies the last value."""
    magnitude = abs(value)
    above = bisect.bisect_left(values, magnitude)
    if above == len(values):
        chosen = above - 1
    elif above == 0:
        chosen = 0
    else:
        down, up = magnitude - values[above - 1], values[above] - magnitude
        chosen = above - 1 if down < up or (down == up and above % 2 == 1) else above
    return math.copysign(values[chosen], value)


def slow_scale(block: np.ndarray, form: Format) -> np.float32:
    largest = max(abs(float(value)) for value in block.reshape(-1))
    if largest == 0:
        return np.float32(1)
    if form.name == "mxfp4":
        return np.float32(2.0 ** (math.floor(math.log2(largest)) - 2))
    return np.float32(largest) / np.float32({"int8": 127, "float8_e4m3fn": 448, "float4_e2m1fn": 6}[form.weight])


@pytest.mark.parametrize("name", SCALED)
def test_values_and_scales_equal_those_of_a_slow_loop(name: str) -> None:
    form = FORMATS[name]
    num_rows, num_columns = 200 if form.block != 512 else 600, 150 if form.block == 128 else 6
    matrix = random_weights(num_rows, num_columns, 1).gate_up[0, 0]
    matrix[: form.block, 1] = 0.0
    values, scale = q.quantise_matrix(matrix, form)
    rows, columns = form.block or num_rows, 128 if form.block == 128 else 1
    representable = values_of(form.weight)
    assert scale is not None
    assert scale.shape == (-(-num_rows // rows), num_columns)
    for row in range(0, num_rows, rows):
        for column in range(0, num_columns, columns):
            block = (slice(row, row + rows), slice(column, column + columns))
            expected = slow_scale(matrix[block], form)
            assert (scale[row // rows, block[1]] == expected).all()
            wanted = [nearest(float(value / expected), representable) for value in matrix[block].reshape(-1)]
            assert values[block].astype(np.float32).reshape(-1).tolist() == wanted
    restored = q.dequantise_matrix(values, scale, form)
    for row in range(num_rows):
        assert (restored[row] == values[row].astype(np.float32) * scale[row // rows]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip_stays_within_half_a_step(name: str) -> None:
    form = FORMATS[name]
    weights = random_weights(200, 130)
    stored = q.quantise(weights, form)
    restored = q.dequantise(stored, form)
    assert str(stored.gate_up.dtype) == str(stored.down.dtype) == form.weight
    scales = {
        "gate_up": stored.gate_up_scale,
        "down": None if stored.down_scale is None else stored.down_scale[:, :, 0],
    }
    for tensor, scale in scales.items():
        old, new = getattr(weights, tensor), getattr(restored, tensor)
        step = 0.0 if scale is None else np.repeat(scale, form.block or old.shape[-2], axis=-2)[..., : old.shape[-2], :]
        relative, absolute = {  # half a unit in the last place, and half the distance of the smallest values
            "float32": (0.0, 0.0),
            "bfloat16": (2**-8, 0.0),
            "int8": (0.0, 0.5),
            "float8_e4m3fn": (2**-4, 2**-10),
            "float4_e2m1fn": (2**-2, 2**-2),
        }[form.weight]
        bound = np.maximum(relative * np.abs(old), absolute * step) * (1 + 1e-5)
        error = np.abs(new - old)
        assert (error <= bound).all()
        if name != "float32":
            assert (error > 0.9 * bound).any()  # it is the bound of this format, not of a coarser one


@pytest.mark.parametrize("name", SCALED)
def test_what_a_format_can_hold_comes_back_exactly(name: str) -> None:
    form = FORMATS[name]
    representable = np.array(values_of(form.weight), np.float32)
    random = np.random.default_rng(1)
    matrix = random.choice(np.concatenate([representable, -representable]), (96, 5)).astype(np.float32)
    matrix[0] = representable[-1]  # every block has the largest value, so the scale is what it was multiplied by
    for row in range(0, 96, form.block or 96):
        matrix[row] = representable[-1]
    # Powers of two for each block and column; square blocks have one for all columns.
    blocks = -(-96 // (form.block or 96))
    exponent = random.integers(-9, 9, (blocks, 1 if form.block == 128 else 5))
    matrix *= np.exp2(np.repeat(exponent, form.block or 96, axis=0)[:96]).astype(np.float32)
    values, scale = q.quantise_matrix(matrix, form)
    assert (q.dequantise_matrix(values, scale, form) == matrix).all()


def test_mxfp4_values_without_the_largest_are_exact_too() -> None:
    form = FORMATS["mxfp4"]
    for top in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        held = [value for value in values_of("float4_e2m1fn") if value <= top]
        column = np.array([(top, *held)[index % (len(held) + 1)] for index in range(32)], np.float32)[:, None]
        values, scale = q.quantise_matrix(column / 8, form)
        assert (q.dequantise_matrix(values, scale, form) == column / 8).all(), top


@pytest.mark.parametrize(
    ("largest", "scale", "stored"),
    [(6.0, 1.0, 6.0), (7.99, 1.0, 6.0), (8.0, 2.0, 4.0), (3.0, 0.5, 6.0), (2.0**-30, 2.0**-32, 4.0)],
)
def test_mxfp4_scale_is_the_power_of_two_below(largest: float, scale: float, stored: float) -> None:
    values, scales = q.quantise_matrix(np.array([[largest], [0.0]], np.float32), FORMATS["mxfp4"])
    assert scales is not None
    assert scales.tolist() == [[scale]]
    assert values.astype(np.float32)[0, 0] == stored


def test_four_bit_values_round_to_even() -> None:
    column = [6.0, 0.25, 0.26, 0.5, 0.74, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, -0.25, -0.3, -2.5]
    values, _ = q.quantise_matrix(np.array(column, np.float32)[:, None], FORMATS["mxfp4"])
    expected = [6.0, 0.0, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -0.5, -2.0]
    assert values.astype(np.float32)[:, 0].tolist() == expected


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e38])
def test_extreme_blocks_have_usable_scales(name: str, size: float) -> None:
    form = FORMATS[name]
    matrix = np.full((130, 3), size, np.float32)
    values, scale = q.quantise_matrix(matrix, form)
    assert scale is not None
    assert (scale >= np.finfo(np.float32).tiny).all()
    restored = q.dequantise_matrix(values, scale, form)
    assert np.abs(restored - matrix).max() <= max(0.25 * size, 1e-37)
    if size == 0:
        assert (scale == 1).all()
        assert (restored == 0).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    matrix = np.ones((40, 3), np.float32)
    matrix[35, 1] = bad
    with pytest.raises(ValueError, match="finite"):
        q.quantise_matrix(matrix, FORMATS[name])


def test_weights_too_large_for_their_type_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        q.quantise_matrix(np.full((2, 2), np.finfo(np.float32).max), FORMATS["bfloat16"])


def test_quantise_keeps_experts_halves_and_biases_apart() -> None:
    form = FORMATS["fp8_block128"]
    weights = random_weights(130, 140, biases=True)
    stored = q.quantise(weights, form)
    assert stored.gate_up_scale.shape == (3, 2, 2, 140)
    assert stored.down_scale.shape == (3, 2, 1, 130)
    for expert in range(3):
        for half in range(2):
            values, scale = q.quantise_matrix(weights.gate_up[expert, half], form)
            assert (stored.gate_up[expert, half] == values).all()
            assert (stored.gate_up_scale[expert, half] == scale).all()
        values, scale = q.quantise_matrix(weights.down[expert], form)
        assert (stored.down[expert] == values).all()
        assert (stored.down_scale[expert, :, 0] == scale).all()
    assert (stored.gate_up_bias == weights.gate_up_bias).all()
    assert (stored.down_bias == weights.down_bias).all()
    with pytest.raises(ValueError, match="already"):
        q.quantise(stored, form)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_types_are_quantised_by_their_float32_values(name: str, dtype: str) -> None:
    matrix = random_weights(64, 32).down[0].astype(np.float64) * (1 + 1e-9)
    matrix = matrix.astype(np.dtype(dtype))
    values, scale = q.quantise_matrix(matrix, FORMATS[name])
    expected_values, expected_scale = q.quantise_matrix(matrix.astype(np.float32), FORMATS[name])
    assert scale is not None
    assert scale.dtype == np.float32
    assert (scale == expected_scale).all()
    assert (values == expected_values).all()


def test_square_scales_of_a_checkpoint_become_scales_of_columns() -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=(300, 200)).astype(np.float32).astype(np.dtype("float8_e4m3fn"))
    scale_inv = random.random((3, 2)).astype(np.dtype("bfloat16"))
    scale = q.from_square_blocks(values, scale_inv)
    restored = q.dequantise_matrix(values, scale, FORMATS["fp8_block128"])
    for row, column in [(0, 0), (127, 127), (128, 0), (0, 128), (299, 199), (255, 130)]:
        expected = np.float32(values[row, column]) * np.float32(scale_inv[row // 128, column // 128])
        assert restored[row, column] == expected
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        q.from_square_blocks(values, scale_inv.T)


PADDED = {"num_tokens": 4, "num_experts": 3, "top_k": 2, "hidden": 200, "intermediate": 130, "num_devices": 2}


@pytest.mark.parametrize("name", FORMATS)
def test_padding_adds_zeros_and_changes_nothing_else(name: str) -> None:
    form = FORMATS[name]
    problem = Problem(**PADDED, format=name, gate_up_bias=True, down_bias=True)
    weights = q.quantise(random_weights(200, 130, biases=True), form)
    padded = q.pad(weights, problem)
    assert padded.gate_up.shape == (4, 2, 256, 256)
    assert padded.down.shape == (4, 256, 256)
    old, new = q.dequantise(weights, form), q.dequantise(padded, form)
    inside = {
        "gate_up": np.s_[:3, :, :200, :130],
        "down": np.s_[:3, :130, :200],
        "gate_up_bias": np.s_[:3, :, :, :130],
        "down_bias": np.s_[:3, :, :200],
    }
    for tensor, place in inside.items():
        array = np.array(getattr(new, tensor))
        assert (array[place] == getattr(old, tensor)).all()
        array[place] = 0
        assert (array == 0).all()
    if form.scaled:
        assert padded.gate_up_scale.shape == (4, 2, form.scale_rows(256), 256)
        assert padded.down_scale.shape == (4, form.num_blocks(256), 1, 256)
        assert (padded.gate_up_scale[3] == 1).all()
        assert (padded.down_scale[..., 200:] == 1).all()
    again = q.pad(padded, problem)
    assert again.gate_up is padded.gate_up
    assert again.down_scale is padded.down_scale


def test_padding_refuses_what_does_not_fit() -> None:
    weights = q.quantise(random_weights(200, 130), FORMATS["int8_channel"])
    problem = Problem(**PADDED, format="int8_channel")
    q.pad(weights, problem)
    with pytest.raises(ValueError, match="does not fit"):
        q.pad(q.quantise(random_weights(260, 130), FORMATS["int8_channel"]), problem)
    with pytest.raises(ValueError, match="gate_up_bias"):
        q.pad(weights, Problem(**PADDED, format="int8_channel", gate_up_bias=True))
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        q.pad(weights, Problem(**PADDED, format="fp8_channel"))


def test_scales_of_another_blocking_are_refused() -> None:
    stored = q.quantise(random_weights(200, 130), FORMATS["fp8_channel"])
    with pytest.raises(ValueError, match="gate_up_scale"):
        q.dequantise(stored, FORMATS["fp8_block128"])


@pytest.mark.parametrize(
    ("source", "target"),
    [("fp8_block128", "fp8_channel"), ("mxfp4", "fp4_block512"), ("mxfp4", "int8_channel"), ("w8a16", "bfloat16")],
)
def test_requantising_is_restoring_and_quantising_with_its_error_told(source: str, target: str) -> None:
    old_form, new_form = FORMATS[source], FORMATS[target]
    old = q.quantise(random_weights(200, 130, biases=True), old_form)
    new, errors = q.requantise(old, old_form, new_form)
    restored = q.dequantise(old, old_form)
    expected = q.quantise(restored, new_form)
    for tensor in ("gate_up", "down", "gate_up_scale", "down_scale", "gate_up_bias", "down_bias"):
        mine, wanted = getattr(new, tensor), getattr(expected, tensor)
        assert (mine is None) == (wanted is None)
        assert mine is None or (mine.shape == wanted.shape and mine.dtype == wanted.dtype and (mine == wanted).all())
    after = q.dequantise(new, new_form)
    pairs = {
        "gate": (restored.gate_up[:, 0], after.gate_up[:, 0]),
        "up": (restored.gate_up[:, 1], after.gate_up[:, 1]),
        "down": (restored.down, after.down),
    }
    assert list(errors) == list(pairs)
    for tensor, (before, now) in pairs.items():
        wanted = np.linalg.norm((now - before).astype(np.float64)) / np.linalg.norm(before.astype(np.float64))
        assert errors[tensor] == pytest.approx(wanted, rel=1e-6)
        assert 1e-4 < errors[tensor] < 0.3


@pytest.mark.parametrize(
    ("source", "target"), [("mxfp4", "mxfp4"), ("bfloat16", "float32"), ("int8_channel", "float32")]
)
def test_requantising_without_loss_says_so(source: str, target: str) -> None:
    old = q.quantise(random_weights(64, 40), FORMATS[source])
    _, errors = q.requantise(old, FORMATS[source], FORMATS[target])
    assert errors == {"gate": 0.0, "up": 0.0, "down": 0.0}


def test_requantising_zeros_has_no_error() -> None:
    zeros = ExpertWeights(np.zeros((1, 2, 8, 4), np.float32), np.zeros((1, 4, 8), np.float32))
    _, errors = q.requantise(zeros, FORMATS["float32"], FORMATS["int8_channel"])
    assert errors == {"gate": 0.0, "up": 0.0, "down": 0.0}
