"""What lies where on several devices, and how much of it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from cases import FIXTURES

from tpu_serve.checkpoint import loader
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.config import ConfigError, EngineConfig, ParallelOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.device.devices import first_devices, take_devices
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import ParamSpec, Source, num_bytes, num_bytes_per_device, padded, random_init
from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import make_plan
from tpu_serve.engine.report import weight_lines
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model


def place(name, num_devices, dtype=jnp.float32):
    model = build_model(read_config(FIXTURES / name))
    return Placement.over(jax.devices()[:num_devices], model.param_specs(dtype), model.cache_layout(dtype))


def bytes_on(device, tree):
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize(
    ("name", "num_devices", "copied"),
    [
        ("qwen3_moe", 1, set()),
        ("qwen3_moe", 2, set()),
        ("qwen3_moe", 3, {"heads", "kv_heads"}),
        ("mixtral", 4, set()),
        ("gemma4", 4, set()),
    ],
)
def test_plan_counts_what_every_device_holds(name, num_devices, copied, caplog):
    caplog.set_level("INFO")
    placement = place(name, num_devices)
    assert set(DEFAULT_RULES) - set(placement.rules) == copied
    assert (f"Every one of the {num_devices} devices holds all of these" in caplog.text) == bool(copied)
    assert all(axis in caplog.text for axis in copied)
    params = random_init(placement.specs, placement.mesh, placement.rules)
    num_pages = (5,) * len(placement.cache_layout.windows)
    caches = placement.cache_layout.allocate(num_pages, 16, 1, placement.mesh, placement.rules)
    for device in jax.devices()[:num_devices]:
        assert bytes_on(device, params) == placement.param_bytes
        layout = placement.cache_on_one_device
        assert bytes_on(device, caches) == 5 * sum(layout.page_bytes(16, window) for window in layout.windows)


def by_hand(path, array, num_devices, head_dim):
    """What several devices hold of a weight: copies of a KV head lie beside it."""
    if not path.startswith(("k_proj", "v_proj")):
        return array
    heads = np.split(array, array.shape[-1] // head_dim, axis=-1)
    return np.concatenate([copy for head in heads for copy in [head] * (num_devices // len(heads))], axis=-1)


@pytest.mark.parametrize(("name", "layer", "num_devices"), [("gpt_oss", 0, 8), ("gemma4", 0, 4), ("gemma4", 4, 4)])
def test_each_device_gets_the_heads_that_its_queries_read(name, layer, num_devices, monkeypatch):
    """From a checkpoint, in pieces that end within a head, and drawn by chance."""
    monkeypatch.setattr(loader, "PIECE_BYTES", 3000)
    model, placement = build_model(read_config(FIXTURES / name)), place(name, num_devices)
    specs, placed = (tree["layers"][layer]["attention"] for tree in (model.param_specs(jnp.float32), placement.specs))
    head_dim = model.cache_layout(jnp.float32).layers[layer].head_dim
    for make in (
        lambda *what: load_params(what[0], FIXTURES / name, *what[1:], ignore=("*",)),
        lambda *what: random_init(*what, seed=5),
    ):
        plain = make(specs, make_mesh(jax.devices()[:1]), {})
        found = make(placed, placement.mesh, placement.rules)
        for path, array in plain.items():
            more = found[path]
            np.testing.assert_array_equal(by_hand(path, np.asarray(array), num_devices, head_dim), more, err_msg=path)
            split = num_devices if path != "o_proj_bias" else 1
            assert more.addressable_shards[0].data.size * split == more.size
    line = next(line for line in weight_lines(placement) if line.path == "layers.*.attention.k_proj")
    assert (line.repeats, line.split) == (num_devices // 2, ("kv_heads",))


def test_the_share_of_each_device_is_what_the_plan_is_made_with():
    specs = {
        "experts": ParamSpec((8, 4, 2), jnp.float32, ("experts", None, None), ()),
        "norm": ParamSpec((10,), jnp.float32, (None,), ()),
    }
    mesh = make_mesh(jax.devices()[:4])
    assert num_bytes(specs) == 4 * (64 + 10)
    assert num_bytes_per_device(specs, mesh, DEFAULT_RULES) == 4 * (16 + 10)
    layout = CacheLayout.uniform(3, 8, 16, jnp.bfloat16)
    assert layout.on_one_device(mesh, DEFAULT_RULES) == CacheLayout.uniform(3, 2, 16, jnp.bfloat16)
    assert layout.on_one_device(mesh, {}) == layout


def test_simulated_devices_share_the_memory_of_the_host():
    assert place("mixtral", 1).chip == cpu_chip()
    assert place("mixtral", 4).chip.memory_bytes == cpu_chip().memory_bytes // 4


def test_weights_too_large_for_a_tpu_name_the_option_that_helps():
    layout = CacheLayout.uniform(4, 2, 32, jnp.bfloat16)
    with pytest.raises(ConfigError, match=r"need 40.00 GiB on each device.*On more devices \(--tensor-parallel-size\)"):
        make_plan(EngineConfig(), 2048, 448, 40 * 2**30, layout, TPU_CHIPS["v6e"])
    with pytest.raises(ConfigError, match=r"KV cache of 9000000 pages.*On more devices \(--tensor-parallel-size\)"):
        make_plan(EngineConfig.from_options(num_pages=9_000_000), 2048, 448, 2**30, layout, TPU_CHIPS["v6e"])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_without_tokens_lie_behind_those_of_the_checkpoint(name):
    """From per-expert tensors; the fused ones go the same way."""
    folder, mesh = FIXTURES / name, make_mesh(jax.devices()[:4])
    model = build_model(read_config(folder))
    plain = load_params(model.param_specs(jnp.bfloat16), folder, make_mesh(jax.devices()[:1]), {})
    specs = padded(model.param_specs(jnp.bfloat16), "experts", 5)
    more = load_params(specs, folder, mesh, {})
    for spec, before, after in zip(*map(jax.tree.leaves, (specs, plain, more)), strict=True):
        assert after.shape == spec.shape
        assert len(after) == (10 if "experts" in spec.axes else len(before))
        np.testing.assert_array_equal(before, after[: len(before)])
        assert not np.asarray(after[len(before) :]).any()


def test_random_weights_do_not_depend_on_padding():
    spec = ParamSpec((3, 4, 5), jnp.bfloat16, (None, "experts", None), (), scale=0.5)
    mesh = make_mesh(jax.devices()[:1])
    plain = random_init({"a": spec}, mesh, {}, seed=3)["a"]
    more = random_init(padded({"a": spec}, "experts", 3), mesh, {}, seed=3)["a"]
    assert more.shape == (3, 6, 5)
    np.testing.assert_array_equal(more[:, :4], plain)
    assert not np.asarray(more[:, 4:]).any()
    assert padded({"a": spec}, "experts", 2) == {"a": spec}


def test_a_checkpoint_with_another_number_of_experts_is_still_refused(tmp_path):
    spec = ParamSpec((3, 2), jnp.float32, ("experts", None), (Source(("x",)),))
    (padded_spec,) = padded([spec], "experts", 2)
    for num_experts in (2, 4):
        safetensors.numpy.save_file({"x": np.ones((num_experts, 2), np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"shape \[{num_experts}, 2\], but the model expects \[3, 2\]"):
            load_params([padded_spec], tmp_path, make_mesh(jax.devices()[:2]), DEFAULT_RULES)


def tpu(number):
    return types.SimpleNamespace(platform="tpu", id=number)


def test_devices_are_the_first_ones_of_this_host():
    assert take_devices(ParallelOptions()) == jax.devices()[:1]
    assert take_devices(ParallelOptions(tensor_parallel_size=3)) == jax.devices()[:3]


def test_too_few_devices_say_how_many_there_are(monkeypatch):
    monkeypatch.delenv("NPROC")
    with pytest.raises(ConfigError) as raised:
        first_devices([tpu(0), tpu(1)], ParallelOptions(tensor_parallel_size=4))
    assert str(raised.value) == "--tensor-parallel-size 4 is more than the 2 tpu devices that this process has."
    with pytest.raises(ConfigError, match=r"set JAX_NUM_CPU_DEVICES=400 and NPROC=808 in the environment"):
        first_devices(jax.devices(), ParallelOptions(tensor_parallel_size=400))


@pytest.mark.parametrize(
    "sizes", [{"mesh": "data=99999999999999"}, {"data_parallel_size": 200, "tensor_parallel_size": 100}]
)
def test_more_devices_than_any_slice_has_are_refused_at_the_door(sizes):
    with pytest.raises(ConfigError, match=r"devices in all, more than the 18432 of the largest slice"):
        ParallelOptions(**sizes)


@pytest.mark.parametrize(("given", "threads"), [("24", 24), ("3", 12), ("500", 500)])
def test_simulated_devices_get_threads_enough(monkeypatch, given, threads):
    monkeypatch.setenv("NPROC", given)
    assert ParallelOptions(tensor_parallel_size=2).num_host_threads == threads


@pytest.mark.parametrize("given", ["", "many", "-1"])
def test_a_senseless_number_of_threads_is_replaced(monkeypatch, given):
    monkeypatch.setenv("NPROC", given)
    assert ParallelOptions(tensor_parallel_size=8).num_host_threads >= 24


def test_experts_are_never_cut():
    with pytest.raises(ConfigError, match="splitting inside an expert is not supported"):
        ParallelOptions(tensor_parallel_size=2, enable_expert_parallel=False)
    ParallelOptions(enable_expert_parallel=False)
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be at least 1, got 0"):
        ParallelOptions(tensor_parallel_size=0)
