"""Slices that libtpu knows, and compiling for them in this process."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_serve.bench.compiled.compiler import compile_here
from tpu_serve.bench.compiled.topology import Topology, target_devices, topology
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import chip_of

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_devices_of_every_size(chip):
    for count in (1, 2, 4, 8, 16):
        devices = target_devices(topology(chip, count))
        assert len(devices) == count
        assert chip_of(devices[0]).name == chip
        places = {(*device.coords, device.core_on_chip) for device in devices}
        assert len(places) == count


def test_unknown_slices_are_explained():
    with pytest.raises(ConfigError, match="refuses the topology v6e:3x5"):
        target_devices(Topology("v6e", (3, 5), 15))


def test_missing_libtpu_is_explained(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tpu-serve\[tpu\]'"):
        target_devices(topology("v6e", 1))


def test_compiling_here():
    mesh = Mesh(np.array(target_devices(topology("v6e", 4))), ("x",))
    argument = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    made = compile_here(lambda a: (a * 2).sum(), [argument])
    assert made.error is None
    assert (made.argument_bytes, made.alias_bytes) == (1024 * 512, 0)
    assert "all-reduce" in made.text
    assert made.seconds > 0
    refused = compile_here(lambda a: a @ a, [argument])
    assert refused.error.startswith("TypeError: dot_general")
    assert "\n" not in refused.error
