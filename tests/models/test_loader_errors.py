"""Whatever is wrong with a checkpoint is said before anything serves: which file, which tensor, what was expected."""

import dataclasses
import os
import re

import jax
import numpy as np
import pytest
from loader_checkpoints import EXPERTS, HIDDEN, INNER, PREFIX, as_tensors, made_experts, save

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import ParamSpec, Source
from tpu_serve.layers.moe.routing import MoEConfig
from tpu_serve.layers.transformer import expert_specs, linear_spec

SIZES = MoEConfig(num_experts=EXPERTS, top_k=2, hidden=HIDDEN, intermediate=INNER, renormalise=True)


def wanted(**sizes):
    config = dataclasses.replace(SIZES, **sizes)
    return {
        "experts": expert_specs(PREFIX, config, np.dtype(np.float32)),
        "head": linear_spec("head", HIDDEN, 32, np.dtype(np.float32), (None, "heads")),
    }


@pytest.fixture
def tensors():
    return as_tensors(*made_experts()) | {"head.weight": np.ones((32, HIDDEN), np.float32)}


def refusal(folder, specs=None, *, may_read=False):
    """What the loader says, flattened; unless told otherwise, without having read a value."""
    reports = []
    with pytest.raises(ConfigError) as caught:
        load_params(
            wanted() if specs is None else specs, folder, make_mesh(jax.devices()[:2]), DEFAULT_RULES,
            progress=lambda done, total: reports.append(done),
        )  # fmt: skip
    assert may_read or not reports
    return str(caught.value)


def test_the_checkpoint_itself_is_good(tmp_path, tensors):
    loaded = load_params(wanted(), save(tmp_path, tensors), make_mesh(jax.devices()[:2]), DEFAULT_RULES)
    assert loaded["head"].shape == (HIDDEN, 32)


def test_a_file_that_is_cut_off(tmp_path, tensors):
    file = save(tmp_path, tensors) / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1000)
    assert refusal(tmp_path) == (
        f"{file} is truncated: it holds {size - 1000} bytes and needs at least {size}, 1000 are missing. Download it again."
    )


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path, tensors):
    file = save(tmp_path, tensors) / "model.safetensors"
    files = SafetensorsFolder(tmp_path)
    os.truncate(file, 5000)
    assert re.fullmatch(
        rf"\S+\.weight in {re.escape(str(file))} cannot be read: the file ends before it\.",
        refusal(files, may_read=True),
    )


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_file_that_goes_away(tmp_path, tensors, is_whole):
    file = save(tmp_path, tensors) / "model.safetensors"
    files = SafetensorsFolder(tmp_path)
    file.unlink()
    if is_whole:  # read as a whole, through a map of the file
        keys = tuple(name for name in tensors if name != "head.weight")
        specs = {
            "x": ParamSpec(
                (1,), np.float32, (None,), (Source(keys, lambda arrays: arrays[0]), Source(("head.weight",)))
            )
        }
        with pytest.raises(
            ConfigError,
            match=rf"{PREFIX}.0.gate_proj.weight and 17 more in {tmp_path}/model.safetensors cannot be read: No such file",
        ):
            load_params(specs, files, make_mesh(jax.devices()[:1]), {}, ignore=["head.weight"])
    else:
        assert re.fullmatch(
            rf"\S+\.weight in {re.escape(str(tmp_path))}\S* cannot be read: No such file or directory\.",
            refusal(files, may_read=True),
        )


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    assert refusal(tmp_path) == f"{tmp_path / 'model.safetensors'} cannot be read: Is a directory."


def test_a_folder_without_weights(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path} has no *.safetensors file. Other weight formats are not read."


def test_a_missing_tensor(tmp_path, tensors):
    del tensors[f"{PREFIX}.4.up_proj.weight"]
    assert refusal(save(tmp_path, tensors)).startswith(
        f"{tmp_path} lacks weights that the model needs (1):\n  {PREFIX}.4.up_proj.weight (there is "
    )


def test_a_tensor_too_many(tmp_path, tensors):
    tensors["model.layers.0.mlp.extra.weight"] = np.zeros(3, np.float32)
    assert refusal(save(tmp_path, tensors)) == (
        f"{tmp_path} holds tensors that the model does not know (1):\n  model.layers.0.mlp.extra.weight"
    )


@pytest.mark.parametrize(
    ("name", "change", "found", "expected"),
    [
        ("head.weight", lambda array: array[:30], "float32[30, 160]", "[32, 160]"),
        (f"{PREFIX}.5.down_proj.weight", lambda array: array.T, "bfloat16[96, 160]", "[160, 96]"),
    ],
)
def test_a_wrong_shape(tmp_path, tensors, name, change, found, expected):
    tensors[name] = change(tensors[name])
    assert refusal(save(tmp_path, tensors)).startswith(
        f"{name} in {tmp_path}/model.safetensors is {found}, but the model expects the shape {expected} for its weight "
    )


def test_a_wrong_type(tmp_path, tensors):
    tensors["head.weight"] = tensors["head.weight"].astype(np.int8)
    assert refusal(save(tmp_path, tensors)) == (
        f"head.weight in {tmp_path}/model.safetensors is int8[32, 160], but the weight head is float32. Is it quantised?"
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_experts": 7}, rf"lacks weights that the model needs \(3\):\n  {PREFIX}\.6\.gate_proj\.weight"),
        ({"num_experts": 5}, rf"holds tensors that the model does not know \(3\):\n  {PREFIX}\.5\.down_proj\.weight"),
        ({"hidden": 128}, rf"{PREFIX}\.0\.gate_proj\.weight in .* is bfloat16\[96, 160\], but the model expects the shape \[96, 128\]"),
        ({"intermediate": 64}, rf"{PREFIX}\.0\.gate_proj\.weight in .* expects the shape \[64, 160\] for its weight experts\.gate_up\. config"),
    ],
)  # fmt: skip
def test_a_config_of_another_model(tmp_path, tensors, sizes, words):
    specs = {"experts": wanted(**sizes)["experts"]}
    assert re.search(
        words, refusal(save(tmp_path, {key: tensors[key] for key in tensors if key != "head.weight"}), specs)
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Source(("x",)), r"x in .* \(float32\[6, 4\]\) gives the weight x shape \[6, 4\], but the model expects \[6, 8\]"),
        (Source(("z",), lambda arrays: arrays[0], row_axis=0), r"z in .* gives the weight x no rows of one shape, but the model expects \[6, 8\]"),
        (Source(("x",), lambda arrays: arrays[0], row_axis=0), r"gives the weight x shape \[6, 4\], but the model expects \[6, 8\]"),
        (Source(("y", "z") * 3, lambda arrays: arrays[0], keys_per_row=1), r"y and 5 more .* gives the weight x no rows of one shape"),
        (Source(("y",) * 6, lambda arrays: arrays[0], keys_per_row=1), r"y and 5 more .* gives the weight x shape \[6, 3\], but"),
    ],
)  # fmt: skip
def test_rows_that_are_no_rows_of_the_weight(tmp_path, source, words):
    """Sources that do not say a shape: it is found out on one row that holds nothing."""
    save(tmp_path, {"x": np.zeros((6, 4), np.float32), "y": np.zeros(3, np.float32), "z": np.zeros(4, np.float32)})
    reports = []
    with pytest.raises(ConfigError, match=words):
        load_params(
            {"x": ParamSpec((6, 8), np.float32, (None, None), (source,))}, tmp_path, make_mesh(jax.devices()[:1]), {},
            ignore=["*"], progress=lambda done, total: reports.append(done),
        )  # fmt: skip
    assert reports == []


def test_a_source_with_too_few_tensors_is_a_mistake_of_the_model(tmp_path):
    save(tmp_path, {"x": np.zeros((6, 4), np.float32)})
    source = Source(("x",), lambda arrays: arrays[0], keys_per_row=1)
    with pytest.raises(ValueError, match="1 tensors for 2 rows of w"):
        load_params(
            {"w": ParamSpec((2, 6, 4), np.float32, (None,) * 3, (source,))}, tmp_path, make_mesh(jax.devices()[:1]), {}
        )


def test_experts_that_devices_cannot_share(tmp_path, tensors):
    folder = save(tmp_path, tensors)
    with pytest.raises(
        ConfigError,
        match=r"weight experts.gate_up cannot be placed: axis 'experts' of size 6 cannot be split over 4 devices",
    ):
        load_params(wanted(), folder, make_mesh(jax.devices()[:4]), DEFAULT_RULES)
