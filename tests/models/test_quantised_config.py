"""What config.json says of quantisation: the methods, and the lists of what is not quantised."""

import json

import numpy as np
import pytest
from quantised_checkpoints import FORMS, FP8, compressed, write

from tpu_serve.checkpoint.quantised.folder import DequantisedFolder, open_checkpoint
from tpu_serve.checkpoint.quantised.scheme import read_scheme
from tpu_serve.checkpoint.quantised.skipped import SkipList
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig, read_config

MODULE = "model.layers.0.self_attn.q_proj"
WEIGHT = np.random.default_rng(0).standard_normal((40, 72)).astype(np.float32)


def scheme(tmp_path, **quantization):
    return read_scheme(HFConfig(tmp_path, {"quantization_config": quantization}))


@pytest.mark.parametrize(
    "method",
    [
        "bitsandbytes",
        "gguf",
        "hqq",
        "aqlm",
        "fbgemm_fp8",
        "torchao",
        "quark",
        "gemma",
        "auto-round",
        "FP8",
        None,
        8,
        ["fp8"],
    ],
)
def test_unknown_method_is_refused_with_what_is_supported(tmp_path, method):
    with pytest.raises(ConfigError) as caught:
        scheme(tmp_path, quant_method=method)
    message = str(caught.value)
    assert f"{tmp_path / 'config.json'}: quant_method {method!r} is not supported" in message
    for known in ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "modelopt", "NVFP4", "pack-quantized"):
        assert known in message


def changed(config, **values):
    return config | values


PACKED = FORMS["ct_w4_group"].config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(FP8, weight_block_size=[128]), "weight_block_size of the quantisation is .128.; supported is two positive integers"),
        (changed(FP8, weight_block_size=[128, 0]), "weight_block_size"),
        (changed(FP8, weight_block_size=[True, 1]), "weight_block_size"),
        (changed(FP8, ignored_layers="lm_head"), "ignored_layers of the quantisation is 'lm_head'; supported is a list"),
        (changed(FP8, ignored_layers=[1]), "must list names of modules as strings, but 1"),
        (changed(FP8, ignore=["re:("]), "lists re:.*not a regular expression"),
        (changed(PACKED, format="marlin-24"), "format of the quantisation is 'marlin-24'; supported is float-quantized or"),
        (changed(PACKED, format=None), "format of the quantisation is None"),
        (changed(PACKED, config_groups={}), "config_groups of the quantisation is {}; supported is an object of one"),
        (changed(PACKED, config_groups=[1]), "config_groups of the quantisation is .1.; supported is an object"),
        (compressed("pack-quantized", num_bits=3), "num_bits of the quantisation is 3; supported is 4 or 8"),
        (compressed("pack-quantized", num_bits=4, group_size=0), "group_size of the quantisation is 0"),
        (compressed("mixed-precision", num_bits=8), "format of the quantisation is None"),
        (changed(PACKED, sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights are not supported"),
        (changed(PACKED, transform_config={"config_groups": {"u": {}}}), "transforms of activations are not supported"),
        (changed(FORMS["gptq"].config, bits=3), "bits of the quantisation is 3; supported is 4 or 8"),
        (changed(FORMS["gptq"].config, checkpoint_format="marlin"), "checkpoint_format .*; supported is gptq or gptq_v2"),
        (changed(FORMS["gptq"].config, pack_dtype="int16"), "pack_dtype"),
        (changed(FORMS["gptq"].config, group_size=-2), "group_size of the quantisation is -2"),
        (changed(FORMS["gptq"].config, dynamic={"+:.*down": {"bits": 8}}), "dynamic gives '\\+:.*down' bits or a group_size"),
        (changed(FORMS["awq"].config, version="gemv"), "version of the quantisation is 'gemv'; supported is gemm"),
        (changed(FORMS["awq"].config, bits=8), "bits of the quantisation is 8; supported is 4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo .*'W4A16_AWQ'; supported is FP8 or NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size .* is 32; supported is 16"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_by_name(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        scheme(tmp_path, **config)


def test_no_scheme_without_a_config(tmp_path):
    assert read_scheme(HFConfig(tmp_path, {})) is None
    assert read_scheme(HFConfig(tmp_path, {"quantization_config": None})) is None
    write(tmp_path, {"x": WEIGHT}, {})
    with pytest.raises(ConfigError, match="has no quantization_config"):
        DequantisedFolder(SafetensorsFolder(tmp_path), read_config(tmp_path))


def test_older_name_and_text_config(tmp_path):
    """Where a model has parts, the text part may hold the key."""
    parts = {f"{MODULE}.{leaf}": part for leaf, part in FORMS["ct_fp8_channel"].encode(WEIGHT).items()}
    quantization = FORMS["ct_fp8_channel"].config
    for place, config in enumerate(
        ({"compression_config": quantization}, {"text_config": {"quantization_config": quantization}})
    ):
        folder = write(tmp_path / str(place), parts, config)
        files = open_checkpoint(folder, read_config(folder))
        assert files.scheme == "FP8, a scale per output channel"


@pytest.mark.parametrize("inside", ["file", "config", "config_method"])
def test_file_of_modelopt_is_read(tmp_path, inside):
    form = FORMS["modelopt_nvfp4"]
    parts = {f"{MODULE}.{leaf}": part for leaf, part in form.encode(WEIGHT).items()}
    own = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
    }
    if inside == "file":
        folder = write(tmp_path, parts, {}, hf_quant_config=own)
    else:
        method = {"quant_method": "modelopt"} if inside == "config_method" else {}
        folder = write(tmp_path, parts, {"quantization_config": own | method})
    files = open_checkpoint(folder, read_config(folder))
    np.testing.assert_array_equal(
        files.read(f"{MODULE}.weight"), form.decode({k.rsplit(".", 1)[1]: v for k, v in parts.items()})
    )


def test_formats_may_be_mixed(tmp_path):
    """Each group of a config has a format of its own; the tensors say which one a weight has."""
    forms = {name: FORMS[name] for name in ("ct_fp8_block", "ct_w4_group", "ct_w8_channel", "ct_nvfp4")}
    groups = {
        name: form.config["config_groups"]["group_0"] | {"format": form.config["format"]}
        for name, form in forms.items()
    }
    parts = {name: form.encode(WEIGHT) for name, form in forms.items()}
    tensors = {f"model.{name}.{leaf}": part for name in forms for leaf, part in parts[name].items()}
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    files = open_checkpoint(write(tmp_path, tensors, {"quantization_config": quantization}), read_config(tmp_path))
    for name, form in forms.items():
        np.testing.assert_array_equal(files.read(f"model.{name}.weight"), form.decode(parts[name]))
    assert sorted(files.scheme.split("; ")) == sorted(form.words for form in forms.values())


def test_a_scheme_that_no_tensor_has_is_said(tmp_path):
    folder = write(tmp_path, {f"{MODULE}.weight": WEIGHT}, {"quantization_config": FP8})
    files = open_checkpoint(folder, read_config(folder))
    assert files.scheme == "not quantised, although config.json says quant_method fp8"
    np.testing.assert_array_equal(files.read(f"{MODULE}.weight"), WEIGHT)


def test_scales_of_activations_and_caches_are_set_aside(tmp_path):
    form = FORMS["ct_fp8_tensor"]
    parts = {f"{MODULE}.{leaf}": part for leaf, part in form.encode(WEIGHT).items()}
    one = np.ones(1, np.float32)
    unused = [
        "model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_scale", "model.layers.0.self_attn.q_scale",
        "model.layers.0.self_attn.k_proj.output_scale", f"{MODULE}.input_zero_point", f"{MODULE}.activation_scale",
        f"{MODULE}.input_activation_scale", f"{MODULE}.output_activation_scale",
    ]  # fmt: skip
    kept = ["model.layers.0.router.scale", "model.layers.0.router.per_expert_scale", "model.layers.0.layer_scalar"]
    tensors = parts | dict.fromkeys([*unused, *kept], one)
    files = open_checkpoint(write(tmp_path, tensors, {"quantization_config": form.config}), read_config(tmp_path))
    assert set(files.unused) == {*unused, f"{MODULE}.input_scale"}
    assert set(files.names) == {f"{MODULE}.weight", *kept}


@pytest.mark.parametrize(
    ("entry", "module", "covers"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("gate", "model.layers.3.mlp.gate", True),
        ("gate", "model.layers.3.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("model.layers.3", "model.layers.3.mlp.up_proj", True),
        ("model.layers.3", "model.layers.31.mlp.up_proj", False),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.12.self_attention.q_proj", False),
        ("model.layers.1.self_attn*", "model.layers.1.self_attn.q_proj", True),
        ("*.mlp.gate", "model.layers.12.mlp.gate", True),
        ("*.mlp.gate", "model.layers.12.mlp.gate_proj", False),
        ("layers.*", "model.layers.0", False),
        ("model.layers.?.mlp", "model.layers.7.mlp.up_proj", True),
        ("model.layers.?.mlp", "model.layers.17.mlp.up_proj", False),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", False),
        ("re:visual.*", "model.visual.blocks.0", False),
        ("re:.*self_attn", "model.layers.1.self_attn.q_proj", True),
        ("model.layers[0]", "model.layers0", False),
        ("", "anything", False),
    ],
)
def test_entries_of_the_list(entry, module, covers):
    assert SkipList(["other", "some*thing", "re:else", entry], "config.json").find(module) == (
        entry if covers else None
    )


KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("entry", [MODULE, "model.layers.0", "model.layers.*.self_attn", "re:.*q_proj$"])
def test_quantised_weight_that_is_listed_as_not_quantised(tmp_path, key, entry):
    form = FORMS["fp8_block_float32"]
    quantization = {name: value for name, value in form.config.items() if name not in KEYS} | {key: [entry]}
    parts = {f"{MODULE}.{leaf}": part for leaf, part in form.encode(WEIGHT).items()}
    write(tmp_path, parts, {"quantization_config": quantization})
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path, read_config(tmp_path))
    assert f"{MODULE}.weight in {tmp_path / 'model.safetensors'} is float8_e4m3fn[40, 72]" in str(caught.value)
    assert f"lists {entry!r} among what is not quantised" in str(caught.value)
    quantization[key] = ["model.layers.1", "re:.*k_proj$"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert len(open_checkpoint(tmp_path, read_config(tmp_path)).names) == 1


def test_what_gptq_leaves_out_dynamically(tmp_path):
    form = FORMS["gptq"]
    parts = {f"{MODULE}.{leaf}": part for leaf, part in form.encode(WEIGHT).items()}
    write(tmp_path, parts, {"quantization_config": form.config | {"dynamic": {"-:.*attn.*": {}}}})
    with pytest.raises(ConfigError, match=r"lists 're:\.\*attn\.\*' among what is not quantised"):
        open_checkpoint(tmp_path, read_config(tmp_path))
