"""Tensors that do not fit together: found from the headers, with the file, the tensor and what was expected."""

import re

import ml_dtypes
import numpy as np
import pytest
from quantised_checkpoints import FORMS, compressed, to_mxfp4, write

from tpu_serve.checkpoint.quantised.folder import open_checkpoint
from tpu_serve.config import ConfigError
from tpu_serve.hf_config import read_config

MODULE = "model.layers.0.mlp.experts.1.up_proj"
WEIGHT = np.random.default_rng(0).standard_normal((40, 72)).astype(np.float32)
F32 = np.float32


def tensors_of(form):
    return {f"{MODULE}.{leaf}": part for leaf, part in FORMS[form].encode(WEIGHT).items()}


def refusal(tmp_path, tensors, quantization):
    config = {} if quantization is None else {"quantization_config": quantization}
    folder = write(tmp_path, tensors, config, num_files=2 if len(tensors) > 1 else 1)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder, read_config(folder))
    return str(caught.value)


def zeros(*shape, dtype=F32):
    return np.zeros(shape, dtype)


I32, I8, U8, F8, F16 = np.int32, np.int8, np.uint8, ml_dtypes.float8_e4m3fn, np.float16

# Form, the tensor that is replaced (None: removed), what is said.
CHANGES = {
    "block_scale_of_wrong_shape": (
        "fp8_block_float32", "weight_scale_inv", zeros(3, 4),
        "weight_scale_inv in .*safetensors is float32.3, 4., but .*weight float8_e4m3fn.40, 72. needs it to be .* of shape .3, 3. or .40, 1.",
    ),
    "block_scale_transposed": ("fp8_block_float32", "weight_scale_inv", zeros(3, 40), r"is float32\[3, 40\], but"),
    "channel_scale_of_wrong_length": ("ct_fp8_channel", "weight_scale", zeros(39, 1), r"float32\[39, 1\], but .*\[40, 1\]"),
    "scale_of_wrong_type": ("fp8_tensor", "weight_scale", zeros(1, dtype=np.int64), "int64.1., but .* needs it to be float32 or"),
    "fp8_without_scale": (
        "fp8_block_float32", "weight_scale_inv", None,
        r"weight in .* is float8_e4m3fn\[40, 72\], but what restores its values, .*weight_scale_inv or .*weight_scale, is missing",
    ),
    "int8_without_scale": ("ct_int8_channel", "weight_scale", None, "weight in .* is int8.*is missing"),
    "scale_of_an_unquantised_weight": (
        "fp8_block_float32", "weight", zeros(40, 72, dtype=ml_dtypes.bfloat16),
        "weight_scale_inv in .* but there is no quantised weight that it belongs to",
    ),
    "weight_of_one_dimension": ("fp8_tensor", "weight", zeros(40, dtype=F8), "float8_e4m3fn.40., but quantised weights have 2 dimensions"),
    "groups_that_no_config_names": ("ct_int8_group", "weight_scale", zeros(40, 9), r"float32\[40, 9\], but .*\[40, 3\]"),
    "zero_point_of_wrong_shape": ("ct_int8_group", "weight_zero_point", zeros(40, 1, dtype=I8), "weight_zero_point in .*int8.40, 1.*.40, 3."),
    "packed_without_scale": ("ct_w4_group", "weight_scale", None, "weight_packed in .* is quantised, but .*weight_scale, .* is missing"),
    "packed_without_size": ("ct_w4_group", "weight_shape", None, "is quantised, but .*weight_shape, which it is restored with, is missing"),
    "packed_size_that_does_not_fit": (
        "ct_w4_group", "weight_shape", np.array([40, 80]),
        r"weight_packed in .* is int32\[40, 9\], but .*weight_shape says \[40, 80\]: packed into 4 or 8 bits .*\[40, 10\] or \[40, 20\]",
    ),
    "packed_size_of_nothing": ("ct_w4_group", "weight_shape", np.array([0, -1]), r"weight_shape says \[0, -1\]"),
    "packed_scale_of_wrong_shape": ("ct_w4_group", "weight_scale", zeros(40, 2), r"weight_scale in .* is float32\[40, 2\], but"),
    "packed_zero_points_unpacked": ("ct_w4_group_zero", "weight_zero_point", zeros(40, 3, dtype=I32), r"int32\[40, 3\], but .*\[5, 3\]"),
    "packed_in_another_order": ("ct_w4_group", "weight_g_idx", zeros(72, dtype=I32), r"weight_g_idx in .*\(actorder\), which is not supported"),
    "gptq_without_zeros": ("gptq", "qzeros", None, "qweight in .* is quantised, but .*qzeros, which it is restored with, is missing"),
    "gptq_scales_of_wrong_shape": ("gptq", "scales", zeros(2, 40, dtype=F16), r"scales in .* is float16\[2, 40\], but .*\[3, 40\]"),
    "gptq_zeros_of_wrong_shape": ("gptq", "qzeros", zeros(3, 40, dtype=I32), r"int32\[3, 40\], but .*\[3, 5\]"),
    "gptq_index_of_wrong_shape": ("gptq", "g_idx", zeros(71, dtype=I32), r"g_idx in .* is int32\[71\], but .*\[72\]"),
    "gptq_weight_of_wrong_type": ("gptq", "qweight", zeros(9, 40, dtype=np.int64), "int64.9, 40., but GPTQ packs 4-bit values into int32"),
    "gptq_outputs_that_fill_no_word": ("gptq", "qweight", zeros(9, 41, dtype=I32), "int32.9, 41., but GPTQ packs"),
    "gptq_without_weight": ("gptq", "qweight", None, "but there is no quantised weight that it belongs to"),
    "awq_without_zeros": ("awq", "qzeros", None, "qweight in .* is quantised, but .*qzeros"),
    "awq_scales_of_wrong_shape": ("awq", "scales", zeros(3, 48, dtype=F16), r"float16\[3, 48\], but .*\[3, 40\]"),
    "awq_zeros_of_wrong_shape": ("awq", "qzeros", zeros(2, 5, dtype=I32), r"int32\[2, 5\], but .*\[3, 5\]"),
    "awq_weight_of_wrong_type": ("awq", "qweight", zeros(72, 5, 1, dtype=I32), "AWQ packs 4-bit values into int32 of shape"),
    "nvfp4_without_global_scale": ("ct_nvfp4", "weight_global_scale", None, "is quantised, but .*weight_global_scale"),
    "nvfp4_without_second_scale": ("modelopt_nvfp4", "weight_scale_2", None, "weight in .* is quantised, but .*weight_scale_2"),
    "nvfp4_without_scale": ("modelopt_nvfp4", "weight_scale", None, "weight in .* is quantised, but .*weight_scale,"),
    "nvfp4_scale_of_wrong_shape": ("ct_nvfp4", "weight_scale", zeros(40, 4, dtype=F8), r"float8_e4m3fn\[40, 4\], but .*\[40, 5\]"),
    "nvfp4_scale_of_wrong_type": ("ct_nvfp4", "weight_scale", zeros(40, 5), "float32.40, 5., but .* needs it to be float8_e4m3fn"),
    "nvfp4_global_scale_per_row": ("ct_nvfp4", "weight_global_scale", zeros(40), r"float32\[40\], but"),
    "nvfp4_of_three_dimensions": ("modelopt_nvfp4", "weight", zeros(2, 40, 36, dtype=U8), "uint8.2, 40, 36., but NVFP4 packs"),
    "weight_beside_its_packed_self": ("ct_w4_group", "weight", zeros(40, 72), "weight in .* stands for: it is there twice"),
    "two_scales": ("fp8_tensor", "weight_scale_inv", zeros(1), "weight in .* is a part of .* twice over"),
}  # fmt: skip


@pytest.mark.parametrize(("form", "leaf", "value", "message"), CHANGES.values(), ids=CHANGES)
def test_tensors_that_do_not_fit_together(tmp_path, form, leaf, value, message):
    tensors = tensors_of(form)
    tensors.pop(f"{MODULE}.{leaf}", None)
    if value is not None:
        tensors[f"{MODULE}.{leaf}"] = value
    found = refusal(tmp_path, tensors, FORMS[form].config)
    assert re.search(message, found, re.DOTALL), found
    assert re.search(rf"{MODULE}\.\w+ in {tmp_path}/model(-[01])?\.safetensors", found), found


def mxfp4_tensors():
    blocks, scales = to_mxfp4(WEIGHT.reshape(1, 72, 40)[:, :64])
    return {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("scales", None, "down_proj_blocks in .* is quantised, but experts.down_proj_scales"),
        ("blocks", None, "down_proj_scales in .* but there is no quantised weight that it belongs to"),
        ("scales", zeros(1, 40, 3, dtype=U8), r"uint8\[1, 40, 3\], but .*\[1, 40, 2\]"),
        ("scales", zeros(1, 40, 2), "float32.* needs it to be uint8"),
        ("blocks", zeros(1, 40, 2, 8, dtype=U8), "MXFP4 packs experts into uint8 of shape"),
        ("blocks", zeros(40, 2, 16, dtype=U8), "MXFP4 packs experts"),
    ],
)  # fmt: skip
def test_mxfp4_that_does_not_fit_together(tmp_path, leaf, value, message):
    tensors = mxfp4_tensors()
    tensors.pop(f"experts.down_proj_{leaf}")
    if value is not None:
        tensors[f"experts.down_proj_{leaf}"] = value
    found = refusal(tmp_path, tensors, {"quant_method": "mxfp4"})
    assert re.search(message, found), found


@pytest.mark.parametrize("form", ["fp8_tensor", "ct_fp8_channel", "ct_w4_group", "gptq", "modelopt_nvfp4"])
def test_quantised_tensors_without_a_config(tmp_path, form):
    found = refusal(tmp_path, tensors_of(form), None)
    assert "config.json has no quantization_config that says how weights are quantised" in found


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ("fp8_block_float32", "mxfp4"),
        ("ct_w4_group", "gptq"),
        ("gptq", "mxfp4"),
        ("awq", "fp8_tensor"),
        ("modelopt_nvfp4", "ct_fp8_channel"),
    ],
)
def test_tensors_of_another_method_than_the_config_says(tmp_path, form, other):
    config = {"quant_method": "mxfp4"} if other == "mxfp4" else FORMS[other].config
    found = refusal(tmp_path, tensors_of(form), config)
    assert config["quant_method"] in found
    assert MODULE in found


def opened(tmp_path, tensors, config):
    folder = write(tmp_path, tensors, {"quantization_config": config})
    return open_checkpoint(folder, read_config(folder))


@pytest.mark.parametrize(
    ("form", "leaf"),
    [
        ("fp8_block_bfloat16", "weight_scale_inv"), ("fp8_block_e8m0", "weight_scale_inv"), ("fp8_tensor", "weight_scale"), ("ct_w4_group", "weight_scale"),
        ("gptq", "scales"), ("awq", "scales"), ("ct_nvfp4", "weight_scale"), ("ct_nvfp4", "weight_global_scale"), ("modelopt_nvfp4", "weight_scale_2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scale_that_is_not_finite(tmp_path, form, leaf, value):
    tensors, name = tensors_of(form), f"{MODULE}.{leaf}"
    scale = tensors[name] = np.array(tensors[name])
    with np.errstate(invalid="ignore"):
        scale.reshape(-1)[-1] = value  # the formats without infinity have NaN in its place
    files = opened(tmp_path, tensors, FORMS[form].config)
    with pytest.raises(ConfigError, match=rf"{name} in .*model\.safetensors holds scales that are not finite"):
        files.read(f"{MODULE}.weight")
    if scale.size > 40:  # rows that it does not scale are there
        assert np.isfinite(files.read(f"{MODULE}.weight", slice(0, 8))).all()


def test_exponent_that_is_no_number(tmp_path):
    tensors = mxfp4_tensors()
    tensors["experts.down_proj_scales"][0, 3, 1] = 255
    files = opened(tmp_path, tensors, {"quant_method": "mxfp4"})
    with pytest.raises(ConfigError, match=r"experts.down_proj_scales in .* not finite"):
        files.read("experts.down_proj")
    with pytest.raises(ConfigError, match=r"experts.down_proj_scales in .* not finite"):
        files.stored("experts.down_proj")


def test_global_scale_of_zero_divides_nothing(tmp_path):
    tensors = tensors_of("ct_nvfp4") | {f"{MODULE}.weight_global_scale": zeros(1)}
    files = opened(tmp_path, tensors, FORMS["ct_nvfp4"].config)
    with pytest.raises(ConfigError, match=r"weight_global_scale in .* is 0, but what it scales is divided by it"):
        files.read(f"{MODULE}.weight")


@pytest.mark.parametrize("group", [-1, 3])
def test_group_that_does_not_exist(tmp_path, group):
    tensors = tensors_of("gptq")
    tensors[f"{MODULE}.g_idx"][5] = group
    files = opened(tmp_path, tensors, FORMS["gptq"].config)
    with pytest.raises(ConfigError, match=rf"g_idx in .* names groups from .*{group}.*, but there are 3 of them"):
        files.read(f"{MODULE}.weight")


def test_config_of_packed_weights_may_name_more_group_sizes(tmp_path):
    """The one that the scales have counts."""
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
    config["config_groups"]["group_1"] = FORMS["ct_w4_group"].config["config_groups"]["group_0"]
    files = opened(tmp_path, tensors_of("ct_w4_group"), config)
    expected = FORMS["ct_w4_group"].decode(FORMS["ct_w4_group"].encode(WEIGHT))
    np.testing.assert_array_equal(files.read(f"{MODULE}.weight"), expected)
