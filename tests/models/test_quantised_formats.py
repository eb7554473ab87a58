"""Every format of quantised weights against its definition, value by value."""

import ml_dtypes
import numpy as np
import pytest
from quantised_checkpoints import FORMS, from_mxfp4, to_mxfp4, write
from quantised_numbers import each, numbers

from tpu_serve.checkpoint.quantised import decode, gptq
from tpu_serve.checkpoint.quantised.folder import open_checkpoint
from tpu_serve.checkpoint.quantised.stored import Stored
from tpu_serve.hf_config import read_config

MODULE = "model.layers.0.self_attn.q_proj"
# Last blocks and groups are cut off: of 16x24, of 32 and of 16. GPTQ and AWQ fill their words.
SHAPES = {"ragged": (40, 72), "small": (8, 8), "square": (32, 96)}
ODD = ("fp8", "ct_fp8", "ct_int8", "ct_w")


def opened(folder):
    return open_checkpoint(folder, read_config(folder))


def weight(shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    values[0, 0], values[-1, -1] = 0, -3
    return values


def equal(found, expected):
    """The same values, bit for bit: -0.0 is not 0.0."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)
    signs = (
        np.where(np.isnan(found), False, np.signbit(found)),
        np.where(np.isnan(expected), False, np.signbit(expected)),
    )
    np.testing.assert_array_equal(*signs)


def folder_of(tmp_path, form, shape, seed=0, **options):
    """A folder with one weight, and its parts."""
    parts = form.encode(weight(shape, seed))
    tensors = {f"{MODULE}.{leaf}": part for leaf, part in parts.items()}
    return opened(write(tmp_path, tensors, {"quantization_config": form.config}, **options)), parts


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_weight_means_what_its_format_says(tmp_path, form, shape):
    files, parts = folder_of(tmp_path, form, shape)
    expected = form.decode(parts)
    name = f"{MODULE}.weight"
    assert list(files.names) == [name]
    assert name in files
    assert files.info(name) == (np.dtype(np.float32), shape)
    assert files.scheme == form.words or shape == (8, 8)  # one group is the whole channel
    equal(files.read(name), expected)
    # A check of the definition itself: it is near the weight that was quantised.
    assert np.abs(expected - weight(shape)).max() < 0.6 * np.abs(weight(shape)).max()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_some_rows_are_those_of_the_whole(tmp_path, form):
    files, parts = folder_of(tmp_path, form, (40, 72))
    expected, name = form.decode(parts), f"{MODULE}.weight"
    for rows in (slice(0, 40), slice(0, 1), slice(5, 29), slice(16, 32), slice(39, 40), slice(33, None), slice(7, 7)):
        equal(files.read(name, rows), expected[rows])
    with pytest.raises(ValueError, match="steps of 2"):
        files.read(name, slice(0, 8, 2))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_large_weights_are_restored_in_pieces(tmp_path, monkeypatch, form):
    monkeypatch.setattr(decode, "_PIECE_VALUES", 400)
    monkeypatch.setattr(gptq, "_REORDERED_ROWS", 16)
    files, parts = folder_of(tmp_path, form, (40, 72))
    expected, name = form.decode(parts), f"{MODULE}.weight"
    equal(files.read(name), expected)
    equal(files.read(name, slice(3, 38)), expected[3:38])


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith(ODD)])
def test_odd_sizes(tmp_path, name):
    files, parts = folder_of(tmp_path, FORMS[name], (33, 77))
    equal(files.read(f"{MODULE}.weight"), FORMS[name].decode(parts))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bytes_are_those_that_are_read(tmp_path, form):
    files, parts = folder_of(tmp_path, form, (40, 72))
    unused = {leaf for leaf in parts if leaf.startswith("input_")}
    assert files.num_bytes(f"{MODULE}.weight") == sum(part.nbytes for leaf, part in parts.items() if leaf not in unused)
    assert set(files.unused) == {f"{MODULE}.{leaf}" for leaf in unused}


@pytest.mark.parametrize("name", ["fp8_block_bfloat16", "gptq", "ct_w4_group_zero", "modelopt_nvfp4"])
def test_parts_may_lie_in_different_files(tmp_path, name):
    files, parts = folder_of(tmp_path, FORMS[name], (40, 72), num_files=2)
    equal(files.read(f"{MODULE}.weight"), FORMS[name].decode(parts))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("shape", [(8, 32), (17, 17)], ids=["even", "odd"])
def test_every_code_of_8_bit_floats(tmp_path, dtype, shape):
    """NaN codes stay NaN, and zeros keep their signs."""
    codes = np.resize(np.arange(256), shape).astype(np.uint8)
    parts = {"weight": codes.view(dtype), "weight_scale": np.array([0.75], np.float32)}
    form = FORMS["fp8_tensor"]
    files = opened(
        write(
            tmp_path, {f"{MODULE}.{leaf}": part for leaf, part in parts.items()}, {"quantization_config": form.config}
        )
    )
    found = files.read(f"{MODULE}.weight")
    assert np.isnan(found).any()
    equal(found, form.decode(parts))


def test_int8_with_zero_points(tmp_path):
    form = FORMS["ct_int8_channel"]
    parts = form.encode(weight((9, 20)))
    zero = np.arange(-4, 5, dtype=np.int8)[:, None]
    tensors = {f"{MODULE}.{leaf}": part for leaf, part in parts.items()} | {f"{MODULE}.weight_zero_point": zero}
    files = opened(write(tmp_path, tensors, {"quantization_config": form.config}))
    expected = (parts["weight"].astype(np.float64) - zero) * parts["weight_scale"]
    equal(files.read(f"{MODULE}.weight", slice(2, 7)), expected.astype(np.float32)[2:7])
    assert files.stored(f"{MODULE}.weight") is None


def test_zero_points_of_packed_weights_may_be_bytes(tmp_path):
    form = FORMS["ct_w4_group_zero"]
    parts = form.encode(weight((40, 72)))
    expected = form.decode(parts)
    words = parts["weight_zero_point"].view(np.uint32)
    codes = np.stack([words >> 4 * k & 15 for k in range(8)], axis=1).reshape(-1, 3)[:40]
    parts["weight_zero_point"] = (codes.astype(np.int64) - 8).astype(np.int8)
    tensors = {f"{MODULE}.{leaf}": part for leaf, part in parts.items()}
    files = opened(write(tmp_path, tensors, {"quantization_config": form.config}))
    equal(files.read(f"{MODULE}.weight"), expected)


STORED = [name for name in FORMS if name.startswith(("fp8", "ct_fp8", "ct_int8", "modelopt_fp8"))]


@pytest.mark.parametrize("name", STORED)
def test_stored_values_are_the_bits_of_the_file(tmp_path, name):
    form = FORMS[name]
    files, parts = folder_of(tmp_path, form, (40, 72))
    stored = files.stored(f"{MODULE}.weight")
    assert stored.values.dtype == parts["weight"].dtype
    assert stored.values.tobytes() == parts["weight"].tobytes()
    scale = next(part for leaf, part in parts.items() if leaf.startswith("weight_scale"))
    assert stored.scale.dtype == np.float32
    np.testing.assert_array_equal(stored.scale.reshape(-1), scale.astype(np.float32).reshape(-1))
    equal(stored.dequantise(), form.decode(parts))
    first = stored.block[0] if stored.scale.shape[0] > 1 else 5
    equal(files.stored(f"{MODULE}.weight", slice(first, 39)).dequantise(), form.decode(parts)[first:39])
    if "block" in name:
        assert stored.block == (16, 24)
        with pytest.raises(ValueError, match="first of a block of 16"):
            files.stored(f"{MODULE}.weight", slice(5, 39))


def test_stored_4_bit_values(tmp_path):
    files, parts = folder_of(tmp_path, FORMS["modelopt_nvfp4"], (40, 72))
    stored = files.stored(f"{MODULE}.weight")
    assert stored.values.dtype == ml_dtypes.float4_e2m1fn
    assert stored.block == (1, 16)
    equal(stored.dequantise(), FORMS["modelopt_nvfp4"].decode(parts))
    for name in ("gptq", "awq", "ct_w4_group"):
        files, _ = folder_of(tmp_path / name, FORMS[name], (40, 72))
        assert files.stored(f"{MODULE}.weight") is None


def test_stored_checks_its_scales():
    values = np.zeros((4, 6), np.int8)
    with pytest.raises(ValueError, match=r"\(4, 6\) in blocks \(2, 4\) have scales float32\(2, 2\)"):
        Stored(values, np.zeros((2, 1), np.float32), (2, 4))


EXPERTS = "model.layers.0.mlp.experts"


def mxfp4_folder(tmp_path, blocks, scales):
    tensors = {f"{EXPERTS}.gate_up_proj_blocks": blocks, f"{EXPERTS}.gate_up_proj_scales": scales}
    tensors[f"{EXPERTS}.gate_up_proj_bias"] = np.ones((len(blocks), blocks.shape[1]), ml_dtypes.bfloat16)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": skipped}}
    return opened(write(tmp_path, tensors, config))


def test_mxfp4_has_the_orientation_of_the_unquantised_experts(tmp_path):
    weights = np.random.default_rng(1).standard_normal((3, 64, 10)).astype(np.float32)
    blocks, scales = to_mxfp4(weights)
    expected = from_mxfp4(blocks, scales)
    assert np.abs(expected - weights).max() < 1
    files = mxfp4_folder(tmp_path, blocks, scales)
    name = f"{EXPERTS}.gate_up_proj"
    assert set(files.names) == {name, f"{name}_bias"}
    assert files.info(name) == (np.dtype(np.float32), (3, 64, 10))
    assert files.num_bytes(name) == blocks.nbytes + scales.nbytes
    assert files.scheme == "MXFP4"
    equal(files.read(name), expected)
    equal(files.read(name, slice(1, 2)), expected[1:2])
    stored = files.stored(name, slice(1, 3))
    assert stored.values.shape == (2, 10, 64)
    assert stored.block == (1, 32)
    equal(stored.dequantise(), expected[1:3].swapaxes(1, 2))
    np.testing.assert_array_equal(files.read(f"{name}_bias", slice(0, 1)), np.ones((1, 10), ml_dtypes.bfloat16))


def test_every_code_of_mxfp4_at_the_ends_of_its_scales(tmp_path):
    """0.5 is subnormal in the type, and so are 2^-127 and what it scales in float32; -0.0 is not 0.0; 6 * 2^127 is beyond float32."""
    codes = np.arange(32, dtype=np.uint8) % 16
    row = codes[0::2] | codes[1::2] << 4
    scales = np.array([0, 1, 127, 252, 254], np.uint8)
    blocks = np.tile(row, (1, len(scales), 1, 1))
    files = mxfp4_folder(tmp_path, blocks, scales.reshape(1, -1, 1))
    found = files.read(f"{EXPERTS}.gate_up_proj")
    with np.errstate(over="ignore"):
        equal(found, from_mxfp4(blocks, scales.reshape(1, -1, 1)))
    assert found[0, 1, 0] == np.float32(2.0**-128) > 0
    assert np.signbit(found[0, 8, 2])
    assert np.isinf(found[0, 7, 4])


@pytest.mark.parametrize(
    ("shape", "place", "config"),
    [
        ((3, 3, 3), lambda o, i: (o // 16, i // 24), FORMS["fp8_block_float32"].config),
        ((3,), lambda o, i: (), FORMS["fp8_tensor"].config),
        ((3, 1), lambda o, i: (0,), FORMS["fp8_tensor"].config),
        ((3, 1, 1), lambda o, i: (0, 0), FORMS["fp8_tensor"].config),
        ((3, 40, 1), lambda o, i: (o, 0), FORMS["ct_fp8_channel"].config),
    ],
    ids=["blocks", "expert", "expert_column", "expert_matrix", "channels"],
)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_all_experts_in_one_tensor(tmp_path, shape, place, config, suffix):
    rng = np.random.default_rng(2)
    values = rng.standard_normal((3, 40, 72)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random(shape).astype(np.float32)
    name = f"{EXPERTS}.gate_up_proj"
    tensors = {name: values, name + suffix: scales, f"{name}_activation_scale": np.ones(3, np.float32)}
    files = opened(write(tmp_path, tensors, {"quantization_config": config}))
    code = numbers(values)
    expected = np.stack(
        [each((40, 72), lambda o, i, e=e: code[e][o][i] * float(scales[(e, *place(o, i))])) for e in range(3)]
    )
    assert list(files.names) == [name]
    equal(files.read(name), expected)
    equal(files.read(name, slice(2, 3)), expected[2:])
    stored = files.stored(name, slice(1, 3))
    assert stored.values.tobytes() == values[1:].tobytes()
    equal(stored.dequantise(), expected[1:])
