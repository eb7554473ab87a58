"""Rotary embedding against values of transformers 5.24.0 (`ROPE_INIT_FUNCTIONS`), for settings that the goldens leave at their defaults."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.rope import Rope, rotate


def rope(**scaling):
    values = {"rope_theta": 10000.0}
    if scaling:
        values["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            **scaling,
        }
    return Rope.from_config(HFConfig(Path(), values), 16, default_theta=1.0)


@pytest.mark.parametrize(
    ("scaling", "second", "third", "magnitude"),
    [
        ({"truncate": False}, 0.225637, 0.0427057, 1.138629436111989),
        ({"attention_factor": 1.5}, 0.237171, 0.05, 1.5),
        ({"beta_fast": 16.0, "beta_slow": 2.0}, 0.237171, 0.05, 1.138629436111989),
    ],
)
def test_yarn_equals_transformers(scaling, second, third, magnitude):
    expected = [1.0, second, third, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05]
    made = rope(**scaling)
    np.testing.assert_allclose(made.inverse_frequencies, expected, rtol=1e-5)
    assert made.magnitude == pytest.approx(magnitude)


def test_plain_rotation_turns_each_pair_by_position_times_frequency():
    made = rope()
    x = np.random.default_rng(0).normal(0, 1, (3, 2, 16)).astype(np.float32)
    positions = np.array([0, 5, 1000])
    turned = np.asarray(rotate(jnp.asarray(x), made.cos_sin(jnp.asarray(positions))))
    pairs = (x[..., :8] + 1j * x[..., 8:]).astype(np.complex128)
    expected = pairs * np.exp(1j * positions[:, None] * 10000.0 ** (-np.arange(8) / 8))[:, None, :]
    np.testing.assert_allclose(turned[..., :8], expected.real, atol=2e-4)
    np.testing.assert_allclose(turned[..., 8:], expected.imag, atol=2e-4)
