"""In which format experts end up, chip by chip, and that what a checkpoint says of itself does not mislead."""

import json

import ml_dtypes
import numpy as np
import pytest
from cases import FIXTURES
from safetensors.numpy import save_file

from tpu_serve.config import ConfigError, ModelOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.engine.quantisation import choose_format
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model

CHIPS = {"cpu": cpu_chip(), **TPU_CHIPS}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}},
}
MXFP4 = {"quant_method": "mxfp4"}


def config(tmp_path, quantization, tensors=None):
    values = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())
    if quantization is not None:
        values["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(values))
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors")
    return read_config(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "chip", "auto", "off"),
    [
        (None, "v6e", None, None),
        (FP8_BLOCK, "tpu7x", "fp8_channel", "fp8_block128"),
        (FP8_BLOCK, "v6e", "int8_channel", "w8a16_block128"),
        (FP8_BLOCK, "cpu", "w8a16_block128", "w8a16_block128"),
        (FP8_CHANNEL, "tpu7x", "fp8_channel", "fp8_channel"),
        (FP8_CHANNEL, "v5e", "int8_channel", "w8a16"),
        (W4A16, "tpu7x", "fp8_channel", None),
        (W4A16, "v5p", "int8_channel", None),
        (W4A16, "cpu", None, None),
        (MXFP4, "tpu7x", "fp4_block512", "mxfp4"),
        (MXFP4, "v6e", "int8_channel", "mxfp4"),
        (MXFP4, "cpu", None, None),
    ],
)
def test_formats_by_chip(tmp_path, quantization, chip, auto, off):
    found = config(tmp_path, quantization)
    assert choose_format(ModelOptions(), found, CHIPS[chip]).name == auto
    assert choose_format(ModelOptions(requantize="off"), found, CHIPS[chip]).name == off


@pytest.mark.parametrize(
    ("asked", "chip", "name"),
    [
        ("int8", "v6e", "int8_channel"),
        ("int8", "cpu", "int8_channel"),
        ("fp8", "tpu7x", "fp8_channel"),
        ("fp8", "v6e", "w8a16"),
    ],
)
def test_what_is_asked_for(tmp_path, asked, chip, name):
    assert choose_format(ModelOptions(quantization=asked), config(tmp_path, None), CHIPS[chip]).name == name


def test_int8_where_there_is_none(tmp_path):
    with pytest.raises(ConfigError, match=r"--quantization int8: tpu7x has no products of int8; --quantization fp8"):
        choose_format(ModelOptions(quantization="int8"), config(tmp_path, None), CHIPS["tpu7x"])


EXPERT = "model.layers.{}.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize(
    ("types", "name"),
    [
        (
            [ml_dtypes.bfloat16, ml_dtypes.bfloat16],
            None,
        ),  # only attention is quantised, or what said so was left behind
        ([ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16], None),  # no format holds both bit for bit
        ([ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn], "w8a16"),
        ([np.int8, np.int8], None),
    ],
)
def test_experts_are_what_their_tensors_are(tmp_path, types, name):
    """Whatever names config.json gives to what is left alone."""
    found = config(tmp_path, FP8_CHANNEL)
    header = {
        EXPERT.format(layer): {
            "dtype": {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int8": "I8"}[np.dtype(kind).name],
            "shape": [1, 4],
            "data_offsets": [8 * layer, 8 * layer + 4 * np.dtype(kind).itemsize],
        }
        for layer, kind in enumerate(types)
    }
    end = 0
    for entry in header.values():
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [end, end + size]
        end += size
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    assert choose_format(ModelOptions(requantize="off"), found, CHIPS["cpu"]).name == name


def test_cut_layers_cut_what_is_said_of_each(tmp_path):
    for name, style in (("gpt_oss", ""), ("gemma4", ""), ("gemma4", "v5_style"), ("qwen3_5_moe", "")):
        whole = read_config(FIXTURES / name / style)
        cut = read_config(FIXTURES / name / style, {"num_hidden_layers": 2})
        assert cut.get("layer_types", kind=list) == whole.get("layer_types", kind=list)[:2]
        assert all(int(layer) < 2 for layer in cut.get("per_layer_config", None) or {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["qwen3_moe"]}, "model_type must be a string"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is too large a number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 16777216"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "all layers of qwen3_moe share one rotary embedding",
        ),
        ({"rope_parameters": {"full_attention": {}, "rope_theta": 5.0}}, "mixes entries per kind of layer"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": 9,
                    "beta_fast": "x",
                }
            },
            "beta_fast of the rotary embedding must be a number",
        ),
    ],
)
def test_values_that_make_no_sense(tmp_path, changes, message):
    values = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        build_model(read_config(tmp_path))
