"""The configs of published models are understood: the declared weights are as many as the models have. Nothing is allocated."""

import json

import jax.numpy as jnp
import pytest
from published_configs import PUBLISHED

from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.params import num_params
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path):
    entry = PUBLISHED[request.param]
    (tmp_path / "config.json").write_text(json.dumps(entry.config))
    return build_model(read_config(tmp_path)), entry


def test_number_of_parameters(published):
    model, entry = published
    assert num_params(model.param_specs(jnp.bfloat16)) / 1e9 == pytest.approx(entry.billions, rel=0.005)


def test_cache_of_a_token(published):
    model, entry = published
    layers = model.cache_layout(jnp.bfloat16).layers
    assert sum(4 * one.num_kv_heads * one.head_dim for one in layers if isinstance(one, PagedCache)) == entry.kv_bytes
