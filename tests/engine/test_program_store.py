"""Programs that were compiled for devices elsewhere are found again by what they are made of."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
