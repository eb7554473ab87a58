"""Whole folders from layout to layout: the same tensors come back, they load alike, and nothing else is lost."""

import itertools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES, PER_EXPERT_MODELS
from expert_checkpoints import GIB, LAYER, contents, convert, experts, nothing_but, random_bits, write
from safetensors import safe_open

from tpu_serve.checkpoint.layouts import FUSED, LAYOUTS, PER_EXPERT, SPLIT, convert_wi
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import DTYPES, INDEX, SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model


@pytest.fixture(params=PER_EXPERT_MODELS)
def fixture_folder(request):
    return FIXTURES / request.param


@pytest.mark.parametrize("ways", [[FUSED], [SPLIT], [FUSED, SPLIT], [SPLIT, FUSED], [SPLIT, SPLIT]], ids=" ".join)
def test_a_checkpoint_comes_back(fixture_folder, ways, tmp_path):
    folder = fixture_folder
    for number, layout in enumerate([*ways, PER_EXPERT]):
        convert(folder, tmp_path / str(number), layout, max_shard_bytes=150_000 if number % 2 else GIB)
        folder = tmp_path / str(number)
    assert contents(folder) == contents(fixture_folder)


@pytest.mark.parametrize("kind", DTYPES)
def test_every_type_and_every_pattern_of_bits_comes_back(kind, tmp_path):
    source = write(tmp_path / "source", experts(DTYPES[kind]))
    convert(source, tmp_path / "split", SPLIT)
    convert(tmp_path / "split", tmp_path / "fused", FUSED)
    convert(tmp_path / "fused", tmp_path / "back", PER_EXPERT)
    assert contents(tmp_path / "back") == contents(source)
    dtype, shape, _ = contents(tmp_path / "split")[f"{LAYER}.wi"]
    assert (dtype, shape) == (DTYPES[kind], (2, 4, 3, 4))


def test_values_of_the_fused_and_the_split_layout(tmp_path):
    tensors = experts()
    source = write(tmp_path / "source", tensors)
    convert(source, tmp_path / "fused", FUSED)
    convert(source, tmp_path / "split", SPLIT)
    wi = np.stack([
        np.concatenate([tensors[f"{LAYER}.{e}.gate_proj.weight"], tensors[f"{LAYER}.{e}.up_proj.weight"]]).T
        for e in range(4)
    ])  # fmt: skip
    wo = np.stack([tensors[f"{LAYER}.{e}.down_proj.weight"].T for e in range(4)])
    assert contents(tmp_path / "fused") == {
        f"{LAYER}.wi": (wi.dtype, (4, 6, 4), wi.tobytes()),
        f"{LAYER}.wo": (wo.dtype, (4, 2, 6), wo.tobytes()),
    }
    split = contents(tmp_path / "split")
    assert split[f"{LAYER}.wi"] == (wi.dtype, (2, 4, 3, 4), wi.tobytes())
    assert split[f"{LAYER}.wo"] == (wo.dtype, (4, 2, 6), wo.tobytes())


def test_stacked_layers_and_an_optimiser_state_convert_too(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "embedding": random_bits(rng, np.float32, 5, 6),
        "layers.shared_experts.wi": np.ones((2, 2, 4)),
        "step": np.array(7),
        "empty": np.zeros((0, 4)),
    }
    for kind in ("params", "mu", "nu"):
        tensors[f"{kind}.layers.moe_block.wi"] = random_bits(rng, np.float32, 2, 3, 4, 6, 10)
        tensors[f"{kind}.layers.moe_block.wo"] = random_bits(rng, np.float32, 2, 3, 4, 5, 6)
    source = write(tmp_path / "source", tensors)
    convert(source, tmp_path / "split", SPLIT)
    found = SafetensorsFolder(tmp_path / "split")
    for name, array in tensors.items():
        routed = name.endswith("moe_block.wi")
        expected = convert_wi(array, FUSED, SPLIT) if routed else array
        assert found.read(name).shape == expected.shape
        assert found.read(name).tobytes() == expected.tobytes()
    convert(tmp_path / "split", tmp_path / "back", FUSED)
    assert contents(tmp_path / "back") == contents(source)
    with pytest.raises(ConfigError, match=r"holds stacked layers \[2, 3\]"):
        convert(source, tmp_path / "single", PER_EXPERT)


def test_odd_sizes_fuse(tmp_path):
    source = write(tmp_path / "source", experts(count=3, hidden=5, inner=3))
    convert(source, tmp_path / "fused", FUSED)
    convert(tmp_path / "fused", tmp_path / "back", PER_EXPERT)
    assert contents(tmp_path / "back") == contents(source)


def load(folder):
    model = build_model(read_config(folder))
    mesh = make_mesh(jax.devices()[:1])
    return load_params(model.param_specs(jnp.float32), folder, mesh, DEFAULT_RULES, ignore=model.ignored_weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_as_the_same_weights(fixture_folder, layout, tmp_path):
    converted = convert(fixture_folder, tmp_path / "copy", layout, max_shard_bytes=100_000)
    assert converted.num_files > 1
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "copy"), load(fixture_folder))
    files = SafetensorsFolder(tmp_path / "copy")
    names = [name for name in files.names if ".experts." in name]
    assert any(name.endswith(".wi") for name in names) is (layout != PER_EXPERT)
    if layout != PER_EXPERT:
        assert {len(files.info(name)[1]) for name in names if name.endswith(".wi")} == {3 if layout == FUSED else 4}


def test_a_wi_of_another_shape_is_refused_by_the_loader(tmp_path):
    convert(FIXTURES / "qwen3_moe", tmp_path / "split", SPLIT)
    files = SafetensorsFolder(tmp_path / "split")
    tensors = {name: files.read(name) for name in files.names}
    tensors[f"{LAYER}.wi"] = tensors[f"{LAYER}.wi"].reshape(4, 4, 32, 64)
    copy = write(tmp_path / "copy", tensors)
    (copy / "config.json").write_bytes((tmp_path / "split" / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"experts\.wi in .* is bfloat16\[4, 4, 32, 64\], but the model expects"):
        load(copy)


def fused_by_transformers(folder):
    """gate_up_proj and down_proj of every layer, under `mlp`, as transformers 5 holds them."""
    files = SafetensorsFolder(folder)
    tensors = {name: files.read(name) for name in files.names if ".experts." not in name}
    gate, up, down = ("w1", "w3", "w2") if "mixtral" in folder.name else ("gate_proj", "up_proj", "down_proj")
    for layer in itertools.count():
        prefix = next((name for name in files.names if f"layers.{layer}." in name and ".experts." in name), None)
        if prefix is None:
            break
        prefix = prefix.partition(".experts.")[0] + ".experts"
        count = sum(name.startswith(f"{prefix}.") for name in files.names) // 3
        part = {r: [files.read(f"{prefix}.{e}.{r}.weight") for e in range(count)] for r in (gate, up, down)}
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([np.stack(part[gate]), np.stack(part[up])], axis=1)
        tensors[f"{prefix}.down_proj"] = np.stack(part[down])
    return {name.replace("block_sparse_moe", "mlp"): array for name, array in tensors.items()}


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_tensors_of_transformers_are_a_source(model, layout, tmp_path):
    source = write(tmp_path / "source", fused_by_transformers(FIXTURES / model))
    (source / "config.json").write_bytes((FIXTURES / model / "config.json").read_bytes())
    convert(source, tmp_path / "copy", layout)
    convert(FIXTURES / model, tmp_path / "expected", layout)
    assert contents(tmp_path / "copy") == contents(tmp_path / "expected")


def test_mixtral_gets_its_published_names(tmp_path):
    source = write(tmp_path / "source", experts(), model_type="mixtral")
    convert(source, tmp_path / "copy", PER_EXPERT)
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    expected = {}
    for name, content in contents(source).items():
        for old, new in (("mlp", "block_sparse_moe"), *renamed.items()):
            name = name.replace(f".{old}.", f".{new}.")
        expected[name] = content
    assert contents(tmp_path / "copy") == expected


@pytest.mark.parametrize("shards", [False, True])
def test_what_lies_in_the_folder(shards, tmp_path):
    source = write(tmp_path / "source", {**experts(), "norm.weight": np.ones(3, np.float32)})
    for name in (
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
        "weights.bin",
        ".hidden",
    ):
        (source / name).write_text(name)
    (source / "original").mkdir()
    (source / "pytorch_model.bin.index.json").write_text("{}")
    size = 100 if shards else GIB
    converted = convert(source, tmp_path / "copy", SPLIT, max_shard_bytes=size)
    weights = [path for path in (tmp_path / "copy").iterdir() if path.suffix == ".safetensors"]
    small = ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "LICENSE", "README.md")
    assert nothing_but(tmp_path / "copy", *small, *(path.name for path in weights), *([INDEX] if shards else []))
    assert (tmp_path / "copy" / "merges.txt").read_text() == "merges.txt"
    assert nothing_but(tmp_path, "source", "copy")
    assert converted.num_files == len(weights) == (3 if shards else 1)
    for path in weights:
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt", "moe_layout": "split"}
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # the data begin at a multiple of 8
    if shards:
        index = json.loads((tmp_path / "copy" / INDEX).read_text())
        assert index["metadata"] == {"format": "pt", "moe_layout": "split", "total_size": converted.num_bytes}
        assert set(index["weight_map"]) == set(contents(tmp_path / "copy"))


def test_shards_hold_no_more_than_asked(tmp_path):
    convert(FIXTURES / "qwen3_moe", tmp_path / "copy", FUSED, max_shard_bytes=100_000)
    sizes = {}
    files = SafetensorsFolder(tmp_path / "copy")
    for name, file in json.loads((tmp_path / "copy" / INDEX).read_text())["weight_map"].items():
        sizes.setdefault(file, []).append(files.num_bytes(name))
    assert all(sum(parts) <= 100_000 or len(parts) == 1 for parts in sizes.values())
    assert list(sizes) != []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("from_layout", LAYOUTS)
def test_memory_is_that_of_a_part_of_a_layer(from_layout, layout, tmp_path, monkeypatch):
    monkeypatch.setattr("tpu_serve.checkpoint.convert._PIECE_BYTES", 2**16)
    tensors = {}
    for layer in range(3):
        tensors |= experts(count=16, hidden=128, inner=64, prefix=f"model.layers.{layer}.mlp.experts")
    convert(write(tmp_path / "source", tensors), tmp_path / "from", from_layout)
    layer_bytes = 16 * 3 * 128 * 64 * 4
    tracemalloc.start()
    convert(tmp_path / "from", tmp_path / "copy", layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < layer_bytes / 2


def test_progress_counts_every_byte_once(tmp_path):
    reports = []
    source = write(tmp_path / "source", {**experts(), "norm.weight": np.ones(3, np.float32)})
    converted = convert(source, tmp_path / "copy", FUSED, progress=lambda *report: reports.append(report))
    steps = np.diff([0, *(done for done, _ in reports)])
    assert (steps > 0).all()
    assert len(steps) == 9
    assert {total for _, total in reports} == {converted.num_bytes}
    assert reports[-1][0] == converted.num_bytes == sum(len(data) for *_, data in contents(source).values())


def test_scales_of_experts_are_kept_and_counted(tmp_path):
    scales = {f"{LAYER}.{e}.gate_proj.weight_scale_inv": np.ones((1, 1), np.float32) for e in range(4)}
    converted = convert(write(tmp_path / "source", experts() | scales), tmp_path / "copy", SPLIT)
    assert converted.kept == tuple(scales)
    assert set(contents(tmp_path / "copy")) == {*scales, f"{LAYER}.wi", f"{LAYER}.wo"}
