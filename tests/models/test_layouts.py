"""However a checkpoint is cut up, the same weights come out."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES, MODELS, PER_EXPERT_MODELS
from safetensors.numpy import load_file, save_file

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import MODELS as REGISTRY
from tpu_serve.models.registry import build_model


def read(name):
    folder = FIXTURES / name
    tensors = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    return build_model(read_config(folder)), tensors, folder


@pytest.fixture(params=MODELS)
def source(request):
    return read(request.param)


def load(model, folder):
    mesh = make_mesh(jax.devices()[:1])
    return load_params(model.param_specs(jnp.bfloat16), folder, mesh, DEFAULT_RULES, ignore=model.ignored_weights)


def assert_same(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


def fuse_experts(tensors):
    """The layout that transformers 5 keeps in memory: gate_up_proj [E, 2I, H], gate rows first, and down_proj [E, H, I], under `mlp`."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
    fused, experts = {}, {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            fused[name] = tensor
    for prefix, parts in experts.items():
        gate, up, down = ("w1", "w3", "w2") if "w1" in parts else ("gate_proj", "up_proj", "down_proj")
        count = len(parts[gate])
        fused[f"{prefix}.gate_up_proj"] = np.stack(
            [np.concatenate([parts[gate][e], parts[up][e]]) for e in range(count)]
        )
        fused[f"{prefix}.down_proj"] = np.stack([parts[down][e] for e in range(count)])
    return {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in fused.items()}


@pytest.mark.parametrize("name", PER_EXPERT_MODELS)
def test_fused_experts_in_shards_equal_the_published_layout(name, tmp_path):
    model, tensors, folder = read(name)
    fused = fuse_experts(tensors)
    assert len(fused) < len(tensors)
    names = sorted(fused)
    shards = {f"model-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in shards.items():
        save_file({name: fused[name] for name in part}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(load(model, tmp_path), load(model, folder))


def test_gaps_and_leftovers_are_named(source, tmp_path):
    model, tensors, _ = source
    missing = next(name for name in tensors if name.endswith(".self_attn.k_proj.weight"))
    del tensors[missing]
    tensors["model.layers.0.self_attn.extra.weight"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load(model, tmp_path)
    assert missing in str(caught.value)
    assert "model.layers.0.self_attn.extra.weight" in str(caught.value)


def test_an_unknown_model_type_says_what_is_supported(source):
    _, _, folder = source
    with pytest.raises(ConfigError, match="model_type 'qwen4_exp' is not supported; supported are") as caught:
        build_model(read_config(folder, {"model_type": "qwen4_exp"}))
    assert all(name in str(caught.value) for name in REGISTRY)
