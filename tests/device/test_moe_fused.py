"""The fused kernel as a backend of the layer: what it gives, and when it is chosen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_moe import HIDDEN, INNER, loop, problem

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.device.mesh import make_mesh
from tpu_serve.layers.moe.backends import choose_backend
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing


def mesh(num_devices):
    return make_mesh(jax.devices()[:num_devices])


def padded(weights, num_devices, lanes=128):
    """As the loader pads them for this backend."""
    widths = [(0, -len(weights) % num_devices)] + [(0, -size % lanes if size > 2 else 0) for size in weights.shape[1:]]
    return jnp.asarray(np.pad(weights, widths))


# The last one is beyond mode D.
@pytest.mark.parametrize(("num_devices", "num_tokens", "top_k"), [(1, 5, 2), (2, 7, 2), (3, 7, 2), (2, 257, 1)])
def test_equals_the_loop(num_devices, num_tokens, top_k):
    num_experts = 5
    x, ids, shares, gate_up, down = problem(num_tokens, num_experts, top_k)
    config = MoEConfig(num_experts, top_k, HIDDEN, INNER, True)
    backend = choose_backend(MoEOptions("fused"), config, cpu_chip(), mesh(num_devices), "float32")
    weights = ExpertWeights(padded(gate_up, num_devices), padded(down, num_devices))
    out = jax.jit(backend)(jnp.asarray(x), Routing(jnp.asarray(shares), jnp.asarray(ids)), weights)
    np.testing.assert_allclose(out, loop(x, ids, shares, gate_up, down), atol=1e-5)


def test_which_steps_it_takes_on_a_tpu():
    config = MoEConfig(128, 8, 2048, 768, True)
    planner = choose_backend(MoEOptions("auto"), config, TPU_CHIPS["v6e"], mesh(8), "bfloat16").planner
    taken = {tokens: planner.plan(tokens).path == "fused" for tokens in (1, 64, 256, 257, 511, 512, 8192)}
    assert taken == {1: True, 64: True, 256: True, 257: False, 511: False, 512: True, 8192: True}
    assert "300 tokens are more than the 256 of mode D and fewer than the 512 of mode G" in planner.plan(300).reason
    for chip, num_devices in ((TPU_CHIPS["v6e"], 1), (cpu_chip(), 8)):
        backend = choose_backend(MoEOptions("auto"), config, chip, mesh(num_devices), "float32")
        few = "ragged" if chip.is_tpu else "gathered"
        assert [backend.planner.plan(tokens).path for tokens in (1, 64, 4096)] == [few, "ragged", "ragged"]
        whole_lanes = {"expert_hidden": 128, "expert_inner": 128} if chip.is_tpu else {}
        assert backend.padding == whole_lanes, "on a CPU weights stay as they are"


def test_the_other_paths_get_what_they_understand():
    """Steps between the modes go to XLA although the weights are padded for the kernel."""
    num_experts, num_tokens = 6, 300
    x, ids, shares, gate_up, down = problem(num_tokens, num_experts, 2)
    config = MoEConfig(num_experts, 2, HIDDEN, INNER, True)
    on_tpu = choose_backend(MoEOptions("auto"), config, TPU_CHIPS["v6e"], mesh(2), "float32")
    assert on_tpu.planner.plan(num_tokens).path == "ragged"
    assert on_tpu.padding == {"expert_hidden": 128, "expert_inner": 128}
    # The same plans with what computes on this machine.
    backend = dataclasses.replace(
        on_tpu, others=choose_backend(MoEOptions("auto"), config, cpu_chip(), mesh(2), "float32").others
    )
    weights = ExpertWeights(padded(gate_up, 2), padded(down, 2))
    out = jax.jit(backend)(jnp.asarray(x), Routing(jnp.asarray(shares), jnp.asarray(ids)), weights)
    np.testing.assert_allclose(out, loop(x, ids, shares, gate_up, down), atol=1e-5)


def test_what_does_not_fit_is_said_before_anything_is_loaded():
    config = MoEConfig(4, 2, 2**20, 256, True)
    with pytest.raises(
        ConfigError,
        match=r"--moe-backend fused cannot run this model: for 1 tokens mode [DG] .* needs .* MiB of VMEM; v5e has",
    ):
        choose_backend(MoEOptions("fused"), config, TPU_CHIPS["v5e"], mesh(2), "bfloat16")
