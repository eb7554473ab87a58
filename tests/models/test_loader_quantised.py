"""Experts are quantised on the way, or taken as they are where the checkpoint holds the format already."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from loader_checkpoints import EXPERTS, HIDDEN, INNER, PREFIX, as_tensors, made_experts, save, specs

from tpu_serve.checkpoint import loader, quantising
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.quantised.stored import Stored
from tpu_serve.checkpoint.quantising import quantised
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import Source, padded
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS

LIMITS = {"float8_e4m3fn": 448, "int8": 127, "float4_e2m1fn": 6}


def mesh(num_devices):
    return make_mesh(jax.devices()[:num_devices])


def column_scales(matrix, block):
    """f32[blocks, N]: the largest magnitude of each run of rows; with blocks of 128 of as many columns together."""
    rows, columns = matrix.shape
    block_rows, block_columns = block or rows, 128 if block == 128 else 1
    scales = np.empty((-(-rows // block_rows), columns), np.float32)
    for row in range(len(scales)):
        for column in range(0, columns, block_columns):
            part = matrix[row * block_rows : (row + 1) * block_rows, column : column + block_columns]
            scales[row, column : column + block_columns] = np.abs(part).max()
    return scales


def reference(matrix, format):
    """Values as float32 and scales, by search among all that the type can hold."""
    matrix, block = matrix.astype(np.float32), FORMATS[format].block
    dtype = np.dtype(FORMATS[format].weight)
    largest = column_scales(matrix, block)
    if block == 32:
        scale = np.float32(2) ** (np.floor(np.log2(largest)) - 2)
    else:
        scale = largest / np.float32(LIMITS[dtype.name])
    codes = (
        np.arange(256, dtype=np.uint8).view(dtype)
        if dtype != np.dtype("float4_e2m1fn")
        else np.arange(16, dtype=np.uint8).view(dtype)
    )
    table = np.unique(codes.astype(np.float32)[np.isfinite(codes.astype(np.float32))])
    by_row = np.repeat(scale, block or len(matrix), axis=0)[: len(matrix)]
    wanted = matrix / by_row
    above = np.searchsorted(table, wanted).clip(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    return low, high, wanted, scale


def assert_quantised(values, scale, matrix, format):
    """Every value is one of its two neighbours in the type, the nearer one, and the scales are exact."""
    low, high, wanted, expected_scale = reference(matrix, format)
    num_blocks = len(expected_scale)
    np.testing.assert_array_equal(scale[:num_blocks], expected_scale)
    assert (scale[num_blocks:] == 1).all()
    got = values.astype(np.float32)
    assert (np.abs(got - wanted) <= np.minimum(np.abs(low - wanted), np.abs(high - wanted))).all()


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block128", "int8_channel", "mxfp4", "fp4_block512"])
@pytest.mark.parametrize(("layout", "num_devices"), [("single", 3), ("fused", 1), ("wi", 2)])
def test_quantised_expert_by_expert(tmp_path, format, layout, num_devices):
    gate_up, down = made_experts()
    save(tmp_path, as_tensors(gate_up, down, layout))
    errors = {}
    loaded = load_params(
        quantised(specs(), FORMATS[format]), tmp_path, mesh(num_devices), DEFAULT_RULES, on_quantised=errors.__setitem__
    )["experts"]
    form = FORMATS[format]
    blocks = {"fp8_block128": (8, 1), "mxfp4": (8, 3)}.get(format, (1, 1))
    for name, given, scale_shape in (
        ("gate_up", gate_up, (EXPERTS, 2, blocks[0], INNER)),
        ("down", down, (EXPERTS, blocks[1], 1, HIDDEN)),
    ):
        weight = loaded[name]
        assert isinstance(weight, QuantisedArray)
        assert (weight.values.dtype, weight.scale.dtype) == (np.dtype(form.weight), jnp.float32)
        assert (weight.values.shape, weight.scale.shape) == (given.shape, scale_shape)
        share = EXPERTS // num_devices
        for array in (weight.values, weight.scale):
            assert {shard.index[0].indices(EXPERTS)[:2] for shard in array.addressable_shards} == {
                (start, start + share) for start in range(0, EXPERTS, share)
            }
        values, scale = np.asarray(weight.values), np.asarray(weight.scale)
        scale = scale[:, :, 0] if name == "down" else scale
        square = difference = 0.0
        for index in np.ndindex(*given.shape[:-2]):
            matrix = given[index].astype(np.float32)
            assert_quantised(values[index], scale[index], matrix, format)
            restored = (
                values[index].astype(np.float32) * np.repeat(scale[index], form.block or len(matrix), 0)[: len(matrix)]
            )
            square += np.sum(matrix.astype(np.float64) ** 2)
            difference += np.sum((restored - matrix).astype(np.float64) ** 2)
        assert errors[f"experts.{name}"] == pytest.approx(np.sqrt(difference / square), rel=1e-5)
        assert 0.001 < errors[f"experts.{name}"] < 0.3


def test_from_float32_and_not_from_the_type_of_the_model(tmp_path):
    """The specs say bfloat16; rounding to it on the way would change many values."""
    gate_up, down = made_experts(dtype=np.float32)
    save(tmp_path, as_tensors(gate_up, down))
    loaded = load_params(quantised(specs(), FORMATS["int8_channel"]), tmp_path, mesh(1), DEFAULT_RULES)["experts"]
    assert_quantised(
        np.asarray(loaded["down"].values)[4], np.asarray(loaded["down"].scale)[4, :, 0], down[4], "int8_channel"
    )


@pytest.mark.parametrize("format", ["fp8_block128", "mxfp4"])
def test_padding_has_values_of_zero_and_scales_of_one(tmp_path, format):
    gate_up, down = made_experts()
    save(tmp_path, as_tensors(gate_up, down))
    plain_specs = quantised(specs(), FORMATS[format])
    plain = load_params(plain_specs, tmp_path, mesh(1), DEFAULT_RULES)["experts"]
    wanted = padded(padded(padded(plain_specs, "experts", 4), "expert_inner", 128), "expert_hidden", 128)
    larger = load_params(wanted, tmp_path, mesh(4), DEFAULT_RULES)["experts"]
    for name, shape in (("gate_up", (8, 2, 256, 128)), ("down", (8, 128, 256))):
        values, scale = np.asarray(larger[name].values), np.asarray(larger[name].scale)
        assert values.shape == shape
        given = tuple(map(slice, plain[name].values.shape))
        np.testing.assert_array_equal(values[given], np.asarray(plain[name].values))
        outside = np.ones(shape, bool)
        outside[given] = False
        assert not values[outside].astype(np.float32).any()
        given = tuple(map(slice, plain[name].scale.shape))
        np.testing.assert_array_equal(scale[given], np.asarray(plain[name].scale))
        outside = np.ones(scale.shape, bool)
        outside[given] = False
        assert (scale[outside] == 1).all()


def test_pieces_and_threads_change_nothing(tmp_path, monkeypatch):
    save(tmp_path, as_tensors(*made_experts()))
    wanted = quantised(specs(), FORMATS["fp8_channel"])
    whole = load_params(wanted, tmp_path, mesh(1), DEFAULT_RULES)
    monkeypatch.setattr(loader, "PIECE_BYTES", 2 * HIDDEN * INNER)
    monkeypatch.setattr(quantising, "_SCRATCH_BYTES", 0)
    for one, other in zip(
        jax.tree.leaves(whole), jax.tree.leaves(load_params(wanted, tmp_path, mesh(2), DEFAULT_RULES)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_formats_without_scales_are_types():
    for name, spec in quantised(specs(), FORMATS["float32"])["experts"].items():
        assert (spec.dtype, spec.format) == (np.float32, None), name


def test_only_the_matrices_of_experts_are_quantised():
    tree = {"mlp": specs()["experts"], "experts": {**specs()["experts"], "gate_up_bias": specs()["experts"]["down"]}}
    changed = quantised({"layers": [tree]}, FORMATS["fp8_channel"])["layers"][0]
    assert changed["mlp"] == tree["mlp"]
    assert changed["experts"]["gate_up_bias"] == tree["experts"]["gate_up_bias"]
    assert changed["experts"]["gate_up"].format.name == "fp8_channel"


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("layout", ["single", "fused"])
def test_a_value_that_is_not_finite_is_named(tmp_path, value, layout):
    gate_up, down = made_experts()
    gate_up[4, 1, 3, 5] = value
    save(tmp_path, as_tensors(gate_up, down, layout))
    place = rf"{PREFIX}\.4\.up_proj\.weight in" if layout == "single" else rf"{PREFIX}\.gate_up_proj \(row 4\) in"
    with pytest.raises(
        ConfigError,
        match=rf"{place} {tmp_path}/model.safetensors holds values that are not finite, .* experts.gate_up is quantised to fp8_channel",
    ):
        load_params(quantised(specs(), FORMATS["fp8_channel"]), tmp_path, mesh(2), DEFAULT_RULES)
    load_params(specs(), tmp_path, mesh(2), DEFAULT_RULES)


class QuantisedView:
    """A checkpoint that holds its experts as `stored` gives them and shows them as float32, some with the outputs last."""

    def __init__(self, files, held, is_transposed=False):
        self.folder, self.names, self._files, self._held, self._transposed = (
            files.folder,
            files.names,
            files,
            held,
            is_transposed,
        )
        self.num_decoded = 0

    def __contains__(self, name):
        return name in self._files

    def info(self, name):
        return np.dtype(np.float32), self._files.info(name)[1]

    def path(self, name):
        return self._files.path(name)

    def num_bytes(self, name):
        return self._files.num_bytes(name) // 2

    def read(self, name, rows=slice(None)):
        self.num_decoded += 1
        values = self.stored(name, rows).dequantise()
        return values.swapaxes(-1, -2) if self._transposed else values

    def stored(self, name, rows=slice(None)):
        held = self._held[name]
        return Stored(held.values[rows], held.scale[rows], held.block)


def held(matrices, dtype, block, seed=1):
    """[..., out, in] values with random bits and scales that no quantiser would choose."""
    generator = np.random.default_rng(seed)
    *leading, rows, columns = matrices
    values = generator.uniform(-4, 4, matrices).astype(dtype)
    scale = generator.uniform(0.5, 2, (*leading, -(-rows // block[0]), -(-columns // block[1]))).astype(np.float32)
    if block[1] == 32:
        scale = np.exp2(np.round(np.log2(scale))).astype(np.float32)
    return Stored(values, scale, block)


def column_scale(stored, block, num_rows):
    """f32[..., B, N] of [..., out, in] values: the scale of each block of inputs and each output."""
    rows = [min(at // stored.block[1], stored.scale.shape[-1] - 1) for at in range(0, num_rows, block or num_rows)]
    outputs = [at // stored.block[0] for at in range(stored.values.shape[-2])]
    return stored.scale[..., outputs, :][..., rows].swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("format", "block"),
    [
        ("fp8_block128", (128, 128)),
        ("w8a16_block128", (1, 128)),
        ("fp8_channel", (1, 1000)),
        ("fp8_channel", (1000, 1000)),
        ("fp8_block128", (1, 256)),
        ("int8_channel", (1, 1000)),
        ("mxfp4", (1, 32)),
    ],
)
@pytest.mark.parametrize("layout", ["single", "fused", "fused and transposed"])
def test_what_the_format_can_hold_is_taken_bit_for_bit(tmp_path, format, block, layout):
    files = SafetensorsFolder(save(tmp_path, as_tensors(*made_experts(), layout.split()[0])))
    dtype = np.dtype(FORMATS[format].weight)
    tensors = {name: held(files.info(name)[1], dtype, block, seed) for seed, name in enumerate(sorted(files.names))}
    wanted = quantised(specs(), FORMATS[format])
    is_transposed = layout.endswith("transposed")
    if is_transposed:
        names = {"gate_up": f"{PREFIX}.gate_up_proj", "down": f"{PREFIX}.down_proj"}
        tree = wanted["experts"]
        gate_up, down = made_experts()
        # As the checkpoint shows them: [E, H, 2I] with gate and up interleaved, and [E, I, H].
        shown = {
            names["gate_up"]: np.stack([gate_up[:, 0], gate_up[:, 1]], -1).reshape(EXPERTS, HIDDEN, 2 * INNER),
            names["down"]: down,
        }
        files = SafetensorsFolder(save(tmp_path, shown))

        def interleaved(arrays):
            return np.moveaxis(arrays[0].reshape(-1, HIDDEN, INNER, 2), 3, 1)

        sources = {
            "gate_up": Source((names["gate_up"],), interleaved, (EXPERTS, HIDDEN, 2 * INNER), row_axis=0),
            "down": Source((names["down"],), shape=(EXPERTS, INNER, HIDDEN)),
        }
        wanted = {"experts": {name: dataclasses.replace(tree[name], sources=(sources[name],)) for name in tree}}
    view = QuantisedView(files, tensors, is_transposed)
    errors = {}
    loaded = load_params(wanted, view, mesh(2), DEFAULT_RULES, on_quantised=errors.__setitem__)["experts"]
    assert (errors, view.num_decoded) == ({"experts.gate_up": 0.0, "experts.down": 0.0}, 0)
    for expert in range(EXPERTS):
        for kind, key in enumerate(("gate_proj", "up_proj", "down_proj")):
            if layout == "single":
                stored = tensors[f"{PREFIX}.{expert}.{key}.weight"]
                values, scale = stored.values.T, column_scale(stored, FORMATS[format].block, stored.values.shape[1])
            else:
                stored = tensors[f"{PREFIX}.{'down_proj' if kind == 2 else 'gate_up_proj'}"]
                values = stored.values[expert].T
                scale = column_scale(stored, FORMATS[format].block, len(values))[expert]
                if kind < 2:
                    part = slice(kind, None, 2) if is_transposed else slice(kind * INNER, (kind + 1) * INNER)
                    values, scale = values[:, part], scale[:, part]
            name = "down" if kind == 2 else "gate_up"
            got_values, got_scale = np.asarray(loaded[name].values)[expert], np.asarray(loaded[name].scale)[expert]
            got_values, got_scale = (got_values, got_scale[:, 0]) if kind == 2 else (got_values[kind], got_scale[kind])
            np.testing.assert_array_equal(got_values.view(np.uint8), np.ascontiguousarray(values).view(np.uint8))
            np.testing.assert_array_equal(got_scale[: len(scale)], scale)


@pytest.mark.parametrize(
    ("format", "dtype", "block"),
    [
        ("fp8_channel", "float8_e4m3fn", (128, 128)),  # several scales a column
        ("fp8_block128", "float8_e4m3fn", (128, 64)),
        ("fp8_block128", "int8", (128, 128)),
        ("fp8_block512", "float8_e4m3fn", (1, 128)),
    ],
)
def test_what_it_cannot_hold_is_quantised_again(tmp_path, format, dtype, block):
    files = SafetensorsFolder(save(tmp_path, as_tensors(*made_experts())))
    tensors = {
        name: held(files.info(name)[1], np.dtype(dtype), block, seed) for seed, name in enumerate(sorted(files.names))
    }
    view = QuantisedView(files, tensors)
    loaded = load_params(quantised(specs(), FORMATS[format]), view, mesh(2), DEFAULT_RULES)["experts"]
    assert view.num_decoded >= 2 * EXPERTS
    restored = tensors[f"{PREFIX}.3.up_proj.weight"].dequantise().T
    assert_quantised(
        np.asarray(loaded["gate_up"].values)[3, 1], np.asarray(loaded["gate_up"].scale)[3, 1], restored, format
    )


def test_a_code_that_is_no_number_is_refused(tmp_path):
    files = SafetensorsFolder(save(tmp_path, as_tensors(*made_experts())))
    tensors = {name: held(files.info(name)[1], ml_dtypes.float8_e4m3fn, (128, 128)) for name in files.names}
    tensors[f"{PREFIX}.2.gate_proj.weight"].values.view(np.uint8)[3, 4] = 0xFF
    with pytest.raises(ConfigError, match=rf"{PREFIX}\.2\.gate_proj\.weight in .* not finite"):
        load_params(quantised(specs(), FORMATS["fp8_block128"]), QuantisedView(files, tensors), mesh(1), DEFAULT_RULES)


def test_a_rule_that_cuts_through_matrices_is_refused(tmp_path):
    save(tmp_path, as_tensors(*made_experts()))
    with pytest.raises(
        ConfigError, match=r"weight experts\.gate_up cannot be placed: .* would split quantised matrices along"
    ):
        load_params(quantised(specs(), FORMATS["fp8_channel"]), tmp_path, mesh(2), {"expert_inner": "model"})
