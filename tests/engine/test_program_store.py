"""Programs that were compiled for devices elsewhere are found again by what they are made of."""

import errno
import functools
import logging
import os
import shutil
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.engine import limits, precompile
from tpu_serve.engine.compiling import set_up_compile_cache
from tpu_serve.runner.compilation import Compilation, Program
from tpu_serve.runner.compile_counter import num_cache_hits, num_compiled
from tpu_serve.runner.program_store import ProgramStore


def step(weights, state, x, *, scale):
    total = jnp.tanh(x @ weights["w"]) * scale
    return {"sum": state["sum"] + total}, (total.sum(), {"x": total})


def program(devices, scale=2.0, name="step of 8 tokens"):
    mesh = Mesh(np.asarray(devices), ("model",))
    split, whole = NamedSharding(mesh, PartitionSpec(None, "model")), NamedSharding(mesh, PartitionSpec())
    shapes = (
        {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=split)},
        {"sum": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)},
        jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=whole),
    )
    function = jax.jit(
        functools.partial(step, scale=scale), donate_argnums=1, out_shardings=({"sum": split}, whole)
    )  # fmt: skip
    return Program(name, lambda: function.lower(*shapes)), (split, whole)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_program_from_the_folder_runs(tmp_path, num_devices):
    devices = jax.devices()[:num_devices]
    one, (split, _) = program(devices)
    entry = ProgramStore(tmp_path, devices).make(one.name, one.lower())
    assert entry.memory["temp_size_in_bytes"] >= 0
    before = num_compiled(), num_cache_hits()

    made = Compilation([one], ProgramStore(tmp_path, devices).take_or_compile).made(one.name)
    assert made.is_kept
    assert made.memory_analysis().temp_size_in_bytes == entry.memory["temp_size_in_bytes"]
    assert (num_compiled() - before[0], num_cache_hits() - before[1]) == (1, 1)
    random = np.random.default_rng(0)
    w, total, x = (random.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 8), (8, 16)))
    state = {"sum": jax.device_put(total, split)}
    new, (scalar, found) = made.compiled({"w": jax.device_put(w, split)}, state, x)
    expected = np.tanh(x @ w) * 2
    np.testing.assert_allclose(found["x"], expected, atol=1e-4)
    np.testing.assert_allclose(new["sum"], total + expected, atol=1e-4)
    np.testing.assert_allclose(scalar, expected.sum(), atol=1e-3)
    assert state["sum"].is_deleted(), "the state is given away, as in the program that was compiled"
    assert new["sum"].sharding == split


def test_another_program_is_not_found(tmp_path, caplog):
    devices = jax.devices()[:2]
    one, _ = program(devices)
    store = ProgramStore(tmp_path, devices)
    store.make(one.name, one.lower())
    with caplog.at_level(logging.INFO, "tpu_serve"):
        made = ProgramStore(tmp_path, devices).take_or_compile(program(devices, scale=3.0)[0])
    assert not made.is_kept
    assert "step of 8 tokens is not among the programs in" in caplog.text
    for other in (ProgramStore(tmp_path, devices, ["XLA_FLAGS=--a"]), ProgramStore(tmp_path, devices[::-1])):
        assert other.path(one.name, one.lower()) != store.path(one.name, one.lower())


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: b"{}\n", lambda text: b""])
def test_a_damaged_file_is_named_and_the_program_compiled(tmp_path, caplog, damage):
    devices = jax.devices()[:1]
    one, _ = program(devices)
    store = ProgramStore(tmp_path, devices)
    store.make(one.name, one.lower())
    path = store.path(one.name, one.lower())
    path.write_bytes(damage(path.read_bytes()))
    made = ProgramStore(tmp_path, devices).take_or_compile(one)
    assert not made.is_kept
    assert f"{path} cannot be used for the step of 8 tokens" in caplog.text
    assert made.compiled is not None


def test_a_damaged_file_is_not_taken_for_a_program_that_is_there(tmp_path):
    devices = jax.devices()[:1]
    one, _ = program(devices)
    store, lowered = ProgramStore(tmp_path, devices), one.lower()
    entry = store.make(one.name, lowered)
    assert store.find(one.name, lowered) == entry
    path = store.path(one.name, lowered)
    path.write_bytes(path.read_bytes()[:-9])
    assert store.find(one.name, lowered) is None


def test_a_full_disk_is_said_and_nothing_is_left_on_it(tmp_path, monkeypatch):
    devices = jax.devices()[:1]
    one, _ = program(devices)

    def half(path, data):
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(ConfigError, match=r"\.program cannot be written: No space left on device"):
        ProgramStore(tmp_path, devices).make(one.name, one.lower())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture
def jax_cache(tmp_path):
    """JAX's cache, in an empty folder."""
    set_up_compile_cache(EngineConfig.from_options(compile_cache_dir=str(tmp_path)).compile)
    yield tmp_path
    set_up_compile_cache(EngineConfig().compile)


def is_found(store, one):
    jax.clear_caches()
    before = num_cache_hits()
    store.take_or_compile(one)
    return num_cache_hits() > before


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b""])
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
def test_an_entry_of_jax_that_was_cut_short_costs_one_more_start_and_not_all(jax_cache, caplog, damage):
    """JAX neither reads nor replaces it."""
    one, _ = program(jax.devices()[:1])
    store = ProgramStore(jax_cache, jax.devices()[:1])
    assert not is_found(store, one)
    assert is_found(store, one)
    (entry,) = jax_cache.glob("jit_step-*-cache")
    entry.write_bytes(damage(entry.read_bytes()))

    assert not is_found(store, one)
    assert entry.exists(), "another process may just be writing it"
    os.utime(entry, (0, 0))
    assert not is_found(store, one)
    assert f"{entry} was damaged and is removed" in caplog.text
    assert not is_found(store, one)
    assert is_found(store, one)
    assert zlib.decompress(entry.read_bytes())


@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache entry")
def test_what_jax_could_not_keep_is_not_said_to_be_there(jax_cache):
    devices = jax.devices()[:1]
    (one, _), (other, _) = program(devices), program(devices, scale=3.0)
    entries = precompile._Entries(jax_cache, devices, ())
    entries.through_jax(other)  # JAX makes the folder at the first one
    shutil.rmtree(jax_cache)
    jax_cache.touch()
    with pytest.raises(ConfigError, match="The program 'step of 8 tokens' could not be kept"):
        entries.through_jax(one)
    jax_cache.unlink()
    jax_cache.mkdir()
    for was_there in (False, True):
        jax.clear_caches()
        entries.through_jax(one)
        assert entries.kept[one.name].was_there == was_there


def test_what_no_server_would_start_is_not_compiled_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_PLACES", 100)
    monkeypatch.setattr(precompile, "ProgramMaker", lambda *_, **__: pytest.fail("programs were made"))
    config = EngineConfig.from_options(
        model=str(FIXTURES / "qwen3_moe"), compile_cache_dir=str(tmp_path), token_buckets=(16,)
    )
    try:
        with pytest.raises(ConfigError, match="more than the 99 that can be numbered"):
            precompile.precompile(config, jax.devices()[:1], lambda name, share: None)
    finally:
        set_up_compile_cache(EngineConfig().compile)
