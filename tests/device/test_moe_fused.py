"""The fused kernel as a backend of the layer: what it gives, and when it is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_moe import HIDDEN, INNER, loop, problem

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.device.mesh import make_mesh
from tpu_serve.layers.moe.backends import choose_backend
from tpu_serve.layers.moe.fused import ByTokens, Fused
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


def test_which_steps_it_takes_on_a_tpu(caplog):
    caplog.set_level("INFO")
    config = MoEConfig(128, 8, 2048, 768, True)
    backend = choose_backend(MoEOptions("auto"), config, TPU_CHIPS["v6e"], mesh(8), "bfloat16")
    assert isinstance(backend, ByTokens)
    assert "MoE backend: fused, or ragged on each of 8 devices where that is not expected to pay" in caplog.text
    taken = {tokens: backend.reason_against(tokens) is None for tokens in (1, 64, 256, 257, 511, 512, 8192)}
    assert taken == {1: True, 64: True, 256: True, 257: False, 511: False, 512: True, 8192: True}
    assert backend.reason_against(300) == "300 tokens are more than the 256 of mode D and fewer than the 512 of mode G"
    assert not isinstance(
        choose_backend(MoEOptions("auto"), config, TPU_CHIPS["v6e"], mesh(1), "float32"), ByTokens | Fused
    )
    assert not isinstance(choose_backend(MoEOptions("auto"), config, cpu_chip(), mesh(8), "float32"), ByTokens | Fused)


def test_the_other_backend_gets_what_it_understands():
    """Steps between the modes go to XLA although the weights are padded for the kernel."""
    num_experts, num_tokens = 6, 300
    x, ids, shares, gate_up, down = problem(num_tokens, num_experts, 2)
    config = MoEConfig(num_experts, 2, HIDDEN, INNER, True)
    fused = Fused(config, mesh(2), cpu_chip(), "float32")
    backend = ByTokens(fused, choose_backend(MoEOptions("ragged"), config, cpu_chip(), mesh(2), "float32"))
    assert backend.reason_against(num_tokens) is not None
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
