"""From files to device arrays: layouts, types, and every tensor accounted for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tpu_serve.checkpoint import accounting
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import ParamSpec, Source, num_bytes, transposed
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen3_moe"
EXPERTS, HIDDEN, INNER = 8, 64, 32
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture
def mesh():
    return make_mesh(jax.devices()[:1])


def load(specs, folder, mesh, **options):
    return load_params(specs, folder, mesh, DEFAULT_RULES, **options)


def save(folder, **tensors):
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def stacked(arrays):
    return np.stack([array.T for array in arrays])


def expert_keys(projection):
    return tuple(f"{LAYER}.{expert}.{projection}.weight" for expert in range(EXPERTS))


def expert_specs(dtype=jnp.bfloat16):
    """Gate, up and down of one layer, from either layout of the experts."""
    axes = ("experts", None, "mlp_inner")
    fused = (f"{LAYER}.gate_up_proj",)
    gate = Source(fused, lambda arrays: arrays[0][:, :INNER].swapaxes(1, 2))
    up = Source(fused, lambda arrays: arrays[0][:, INNER:].swapaxes(1, 2))
    down = Source((f"{LAYER}.down_proj",), lambda arrays: arrays[0].swapaxes(1, 2))
    return {
        name: ParamSpec(shape, dtype, axes, (Source(expert_keys(f"{name}_proj"), stacked), alternative))
        for name, shape, alternative in [
            ("gate", (EXPERTS, HIDDEN, INNER), gate),
            ("up", (EXPERTS, HIDDEN, INNER), up),
            ("down", (EXPERTS, INNER, HIDDEN), down),
        ]
    }


def weight(name, shape, dtype=jnp.float32, transform=None):
    sources = (Source((name,)) if transform is None else Source((name,), transform),)
    return ParamSpec(shape, dtype, (None,) * len(shape), sources)


def published_experts():
    tensors = safetensors.numpy.load_file(FIXTURE / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith(LAYER)}


def fused_experts():
    tensors = published_experts()
    gate, up, down = (
        np.stack([tensors[key] for key in expert_keys(name)]) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return {f"{LAYER}.gate_up_proj": np.concatenate([gate, up], 1), f"{LAYER}.down_proj": down}


def test_real_folder_with_nested_tree(mesh):
    specs = {
        "table": weight("model.embed_tokens.weight", (512, HIDDEN), jnp.bfloat16),
        "layers": [
            {"router": weight(f"model.layers.{layer}.mlp.gate.weight", (HIDDEN, EXPERTS), transform=transposed)}
            for layer in range(3)
        ],
    }
    params = load(specs, FIXTURE, mesh, ignore=["*proj.weight", "*norm.weight", "lm_head.weight"])
    files = SafetensorsFolder(FIXTURE)
    np.testing.assert_array_equal(np.asarray(params["table"]), files.read("model.embed_tokens.weight"))
    for layer in range(3):
        router = params["layers"][layer]["router"]
        assert (router.dtype, router.shape) == (jnp.float32, (HIDDEN, EXPERTS))
        stored = files.read(f"model.layers.{layer}.mlp.gate.weight")
        np.testing.assert_array_equal(np.asarray(router), stored.astype(np.float32).T)


def test_experts_one_by_one_and_fused_are_the_same(mesh, tmp_path):
    one_by_one = load(
        expert_specs(),
        FIXTURE,
        mesh,
        ignore=["model.[!l]*", "lm_head*", "model.layers.[12]*", "*norm*", "*self_attn*", "*gate.weight"],
    )
    fused = load(expert_specs(), save(tmp_path, **fused_experts()), mesh)
    stored = published_experts()
    np.testing.assert_array_equal(np.asarray(one_by_one["up"][5]), stored[f"{LAYER}.5.up_proj.weight"].T)
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(np.asarray(one_by_one[name]), np.asarray(fused[name]))
        assert one_by_one[name].sharding.spec[0] == ("data", "model")


def test_first_complete_source_is_read(mesh, tmp_path):
    save(tmp_path, b=np.ones(2, np.float32), c=np.zeros(2, np.float32))
    spec = ParamSpec(
        (2,), jnp.float32, (None,), (Source(("a", "b"), lambda arrays: arrays[1] * 3), Source(("b",)), Source(("c",)))
    )
    np.testing.assert_array_equal(np.asarray(load({"x": spec}, tmp_path, mesh, ignore=["c"])["x"]), np.ones(2))


def test_placement_follows_the_rules(mesh, tmp_path):
    save(tmp_path, x=np.ones((4, 2), np.float32))
    spec = ParamSpec((4, 2), jnp.float32, ("vocab", None), (Source(("x",)),))
    array = load_params({"x": spec}, tmp_path, mesh, {"vocab": "model"})["x"]
    assert array.sharding.spec == jax.sharding.PartitionSpec("model", None)
    with pytest.raises(ConfigError, match=r"weight x cannot be placed: axes .* put two dimensions on one mesh axis"):
        load_params(
            {"x": ParamSpec((4, 2), jnp.float32, ("vocab", "heads"), (Source(("x",)),))}, tmp_path, mesh, DEFAULT_RULES
        )


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_types_widen_exactly(mesh, tmp_path, stored):
    values = np.array([1.0, -0.375, 448.0, 2.0**-6], np.float32)
    # The package cannot write 8-bit floats, so the file is written as bytes and its header says what they are.
    save(tmp_path, x=values.astype(stored).view(np.uint8))
    names = {1: ("U8", "F8_E4M3"), 2: ("U8", "F16" if stored is np.float16 else "BF16")}
    size = np.dtype(stored).itemsize
    file = tmp_path / "model.safetensors"
    old, new = (
        f'"dtype":"{name}","shape":[{count}]'.encode() for name, count in zip(names[size], (4 * size, 4), strict=True)
    )
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(old, new)
    assert header != content[8 : 8 + length]
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    np.testing.assert_array_equal(np.asarray(load({"x": weight("x", (4,))}, tmp_path, mesh)["x"]), values)


def test_arrays_do_not_alias_the_file(mesh, tmp_path):
    file = tmp_path / "model.safetensors"
    header = b'{"x":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}'.ljust(
        120
    )  # data at byte 128: aligned for jax
    file.write_bytes(len(header).to_bytes(8, "little") + header + np.ones(1024, np.float32).tobytes())
    array = load({"x": weight("x", (1024,))}, tmp_path, mesh)["x"]
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(bytes(4096))
    np.testing.assert_array_equal(np.asarray(array), np.ones(1024))


def test_progress_counts_bytes_of_the_checkpoint(mesh, tmp_path):
    save(tmp_path, a=np.zeros((4, 4), np.float32), b=np.zeros(8, np.float32))
    seen = []
    specs = {"a": weight("a", (4, 4), jnp.bfloat16), "b": weight("b", (8,), jnp.bfloat16)}
    load(specs, tmp_path, mesh, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 96), (64, 96), (96, 96)]
    assert num_bytes(specs) == 48


@pytest.fixture
def no_reading(monkeypatch):
    """Fails the test when any tensor's values are read."""
    for method in ("read", "read_part"):
        monkeypatch.setattr(SafetensorsFolder, method, lambda self, name, *_: pytest.fail(f"{name} was read"))


def test_gaps_are_found_before_reading(mesh, no_reading):
    specs = {
        "norm": weight("model.final_norm.weight", (HIDDEN,)),
        "router": weight("model.layers.0.mlp.router.weight", (EXPERTS, HIDDEN)),
        "there": weight("model.embed_tokens.weight", (512, HIDDEN)),
    }
    with pytest.raises(ConfigError) as caught:
        load(specs, FIXTURE, mesh, ignore=["*"])
    text = str(caught.value)
    assert "lacks weights that the model needs (2):" in text
    assert "\n  model.final_norm.weight (there is model.norm.weight)" in text
    assert "\n  model.layers.0.mlp.router.weight (there is model.layers.0.mlp.gate.weight)" in text
    assert "embed_tokens" not in text


def test_what_older_tools_wrote_beside_the_weights_is_no_surprise(mesh, tmp_path):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        f"{LAYER}.0.up_proj.bias": np.zeros(3, np.float16),
    }
    load(expert_specs(), save(tmp_path, **published_experts(), **extra), mesh)
    extra[f"{LAYER}.0.up_proj.bias"][1] = 1
    with pytest.raises(ConfigError, match=rf"does not know \(1\):\n  {LAYER}\.0\.up_proj\.bias"):
        load(expert_specs(), save(tmp_path, **published_experts(), **extra), mesh)


def test_gaps_of_the_layout_that_is_nearly_there(mesh, tmp_path, no_reading):
    tensors = fused_experts()
    del tensors[f"{LAYER}.down_proj"]
    # Nothing of either layout of down is there, but the tensor beside one of them.
    with pytest.raises(ConfigError, match=rf"model needs \(1\):\n  {LAYER}\.down_proj") as caught:
        load(expert_specs(), save(tmp_path, **tensors), mesh)
    assert "does not know" not in str(caught.value)
    tensors = published_experts()
    del tensors[f"{LAYER}.3.up_proj.weight"]
    with pytest.raises(
        ConfigError, match=rf"lacks weights that the model needs \(1\):\n  {LAYER}\.3\.up_proj\.weight"
    ) as caught:
        load(expert_specs(), save(tmp_path, **tensors), mesh)
    assert "does not know" not in str(caught.value)


def test_leftovers_are_found_before_reading(mesh, no_reading):
    norm = {"norm": weight("model.norm.weight", (HIDDEN,))}
    with pytest.raises(ConfigError) as caught:
        load(norm, FIXTURE, mesh, ignore=["model.layers.*"])
    assert "holds tensors that the model does not know (2):\n  lm_head.weight\n  model.embed_tokens.weight" in str(
        caught.value
    )
    with pytest.raises(ConfigError) as caught:
        load(norm, FIXTURE, mesh)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + accounting.MAX_NAMES + 1
    assert lines[-1] == f"  … and {len(SafetensorsFolder(FIXTURE).names) - 1 - accounting.MAX_NAMES} more"


def test_both_layouts_at_once_are_leftovers(mesh, tmp_path):
    with pytest.raises(ConfigError, match=rf"does not know \(2\):\n  {LAYER}\.down_proj\n  {LAYER}\.gate_up_proj"):
        load(expert_specs(), save(tmp_path, **published_experts(), **fused_experts()), mesh)


def test_wrong_shape_names_the_tensor_and_both_shapes(mesh, tmp_path):
    save(tmp_path, **{"model.norm.weight": np.zeros((3, 5), np.float32)})
    words = r"model\.norm\.weight in .* \(float32\[3, 5\]\) gives the weight norm shape \[5, 3\], but the model expects \[64\]"
    with pytest.raises(ConfigError, match=words):
        load({"norm": weight("model.norm.weight", (64,), transform=transposed)}, tmp_path, mesh)


def test_shapes_that_do_not_combine(mesh, tmp_path):
    tensors = published_experts()
    tensors[f"{LAYER}.7.up_proj.weight"] = np.zeros((3, 3), ml_dtypes.bfloat16)
    words = (
        r"experts\.0\.up_proj\.weight and 7 more .*bfloat16\[3, 3\], bfloat16\[32, 64\].* cannot become the weight up"
    )
    with pytest.raises(ConfigError, match=words):
        load(expert_specs(), save(tmp_path, **tensors), mesh)


def test_integers_do_not_become_floats(mesh, tmp_path):
    save(tmp_path, x=np.zeros(4, np.uint8))
    with pytest.raises(ConfigError, match=r"x in .* is uint8\[4\], but the weight x is float32\. Is it quantised\?"):
        load({"x": weight("x", (4,))}, tmp_path, mesh)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("lm_head.weight", lambda array: array[:500]),
        ("lm_head.weight", lambda array: array.astype(np.int8)),
        ("model.layers.2.mlp.experts.7.up_proj.weight", lambda array: array.T),  # as many values as the right one
    ],
)
def test_what_headers_tell_is_refused_before_any_value_is_read(tmp_path, mesh, name, change):
    files, model = SafetensorsFolder(FIXTURE), build_model(read_config(FIXTURE))
    tensors = {key: files.read(key) for key in files.names}
    save(tmp_path, **(tensors | {name: change(tensors[name])}))
    reports = []
    with pytest.raises(ConfigError, match=name):
        load_params(
            model.param_specs(jnp.float32), tmp_path, mesh, DEFAULT_RULES,
            progress=lambda done, total: reports.append(done),
        )  # fmt: skip
    assert reports == []
