"""Quantised copies of whole models, loaded as the server loads them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantised_checkpoints import FORMS, from_mxfp4, quantise_folder, to_mxfp4, write

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.quantised.folder import DequantisedFolder, open_checkpoint
from tpu_serve.checkpoint.quantising import quantised
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import ParamSpec, Source
from tpu_serve.hf_config import read_config
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.models.registry import build_model

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen3_moe"


def load(specs, files, num_devices=1):
    return load_params(specs, files, make_mesh(jax.devices()[:num_devices]), DEFAULT_RULES)


@pytest.mark.parametrize(
    "name",
    ["fp8_block_bfloat16", "ct_fp8_channel", "ct_w4_group_zero", "gptq_reordered", "awq", "ct_nvfp4", "modelopt_nvfp4"],
)
def test_quantised_copy_of_a_model_loads_as_what_it_means(tmp_path, name):
    folder, meant = quantise_folder(FIXTURE, tmp_path / "quantised", FORMS[name], num_files=2)
    config = read_config(folder)
    plain = write(tmp_path / "plain", meant, {})
    specs = build_model(config).param_specs(jnp.float32)
    files = open_checkpoint(folder, config)
    assert isinstance(files, DequantisedFolder)
    assert files.scheme == FORMS[name].words
    assert set(files.names) == set(meant)
    found, expected = load(specs, files, 2), load(specs, SafetensorsFolder(plain), 2)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    original = load(specs, SafetensorsFolder(FIXTURE), 2)
    given, restored = (np.asarray(tree["layers"][0]["attention"]["q_proj"]) for tree in (original, found))
    assert 0 < np.abs(restored - given).max() < np.abs(given).max() / 4


def test_unquantised_folder_is_opened_as_it_is():
    assert isinstance(open_checkpoint(FIXTURE, read_config(FIXTURE)), SafetensorsFolder)


def test_mxfp4_experts_load_by_the_names_of_the_unquantised_ones(tmp_path):
    rng = np.random.default_rng(4)
    prefix, tensors, meant = "model.layers.0.mlp.experts", {}, {}
    for name, shape in (("gate_up_proj", (4, 64, 48)), ("down_proj", (4, 32, 64))):
        blocks, scales = to_mxfp4(rng.standard_normal(shape).astype(np.float32))
        tensors |= {f"{prefix}.{name}_blocks": blocks, f"{prefix}.{name}_scales": scales}
        meant[name] = from_mxfp4(blocks, scales)
    folder = write(tmp_path, tensors, {"quantization_config": {"quant_method": "mxfp4"}}, num_files=2)
    specs = {
        name: ParamSpec(
            values.shape,
            jnp.bfloat16,
            ("experts", None, None),
            (Source((f"{prefix}.{name}",), shape=values.shape, row_axis=0),),
        )
        for name, values in meant.items()
    }
    found = load(specs, open_checkpoint(folder, read_config(folder)), 4)
    for name, values in meant.items():
        np.testing.assert_array_equal(np.asarray(found[name]), values.astype(ml_dtypes.bfloat16))


def test_scale_that_is_not_finite_stops_loading(tmp_path):
    folder, _ = quantise_folder(FIXTURE, tmp_path / "quantised", FORMS["ct_fp8_channel"])
    data = (folder / "model.safetensors").read_bytes()
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    file = SafetensorsFolder(folder)
    scale = file.read(name)
    changed = data.replace(scale.tobytes(), np.full_like(scale, np.nan).tobytes())
    assert changed != data
    del scale, file
    (folder / "model.safetensors").write_bytes(changed)
    config = read_config(folder)
    files = open_checkpoint(folder, config)  # values are not looked at yet
    with pytest.raises(ConfigError, match=rf"{name} in .*model\.safetensors holds scales that are not finite"):
        load(build_model(config).param_specs(jnp.float32), files)


@pytest.mark.parametrize(
    ("form", "format"),
    [("ct_fp8_channel", "fp8_channel"), ("fp8_tensor", "w8a16"), ("ct_int8_channel", "int8_channel")],
)
def test_experts_keep_every_bit_where_the_kernel_has_their_format(tmp_path, form, format):
    folder, _ = quantise_folder(FIXTURE, tmp_path, FORMS[form])
    config, raw = read_config(folder), SafetensorsFolder(folder)
    errors = {}
    specs = quantised(build_model(config).param_specs(jnp.float32), FORMATS[format])
    files = open_checkpoint(folder, config)
    found = load_params(
        specs,
        files,
        make_mesh(jax.devices()[:1]),
        DEFAULT_RULES,
        on_quantised=lambda path, error: errors.update({path: error}),
    )
    assert errors
    assert set(errors.values()) == {0.0}
    for expert in range(8):
        module = f"model.layers.2.mlp.experts.{expert}.up_proj"
        layer = found["layers"][2]["experts"]["gate_up"]
        values, scale = raw.read(f"{module}.weight"), raw.read(f"{module}.weight_scale").astype(np.float32)
        assert np.asarray(layer.values[expert, 1]).tobytes() == values.T.tobytes()
        np.testing.assert_array_equal(np.asarray(layer.scale[expert, 1, 0]), np.broadcast_to(scale.reshape(-1), 32))
