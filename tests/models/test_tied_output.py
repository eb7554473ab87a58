"""A model that uses its embedding as the output table, whose checkpoint holds an output table all the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from cases import FIXTURES

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.config import ConfigError
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model

MODEL = build_model(read_config(FIXTURES / "qwen3_moe_tied"))
TENSORS = safetensors.numpy.load_file(FIXTURES / "qwen3_moe_tied" / "model.safetensors")
EMBEDDING = TENSORS["model.embed_tokens.weight"]


def load(folder, output_table):
    tensors = TENSORS | ({} if output_table is None else {"lm_head.weight": output_table})
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    specs, mesh = MODEL.param_specs(jnp.float32), make_mesh(jax.devices()[:1])
    return load_params(specs, folder, mesh, DEFAULT_RULES, ignore=MODEL.ignored_weights)


@pytest.mark.parametrize("output_table", [None, EMBEDDING], ids=["not there", "the embedding again"])
def test_one_table_is_used_for_both(tmp_path, output_table):
    loaded = load(tmp_path, output_table)["embedding"]
    np.testing.assert_array_equal(loaded, EMBEDDING)


@pytest.mark.parametrize("where", [0, -1])
def test_another_table_is_refused(tmp_path, where, monkeypatch):
    monkeypatch.setattr("tpu_serve.checkpoint.accounting.ROWS_COMPARED", 100)
    other = EMBEDDING.copy()
    other[where, -1] += 1
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight in .* is not the same as model\.embed_tokens\.weight"
    ) as caught:
        load(tmp_path, other)
    assert re.search("--hf-overrides '{\"tie_word_embeddings\": false}'", str(caught.value))


def test_a_table_of_another_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not the same as"):
        load(tmp_path, EMBEDDING[:-1].copy())
