"""Models with the weights of a fixture, and their logits of whole prompts: what tests against goldens share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import FIXTURES
from whole_sequence import WholeSequence

from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.quantised.folder import open_checkpoint
from tpu_serve.device.kv_cache import StateCache
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.hf_config import read_config
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.layers.moe.backends import Dense, Ragged
from tpu_serve.layers.moe.expert import Expert
from tpu_serve.models.registry import build_model

BACKENDS = {
    "dense": Dense(),
    "ragged blocks": Ragged(chip_is_tpu=False),
    "ragged_dot": Ragged(chip_is_tpu=True),
}
ROWS = 144
"""Every prompt is padded to this, so that one program a backend and model serves all tests."""


def load_fixture(name):
    """(model, float32 weights, golden values) of a folder under tests/fixtures."""
    folder = FIXTURES / name
    config = read_config(folder)
    model, files = build_model(config), open_checkpoint(folder, config)
    mesh = make_mesh(jax.devices()[:1])
    params = load_params(model.param_specs(jnp.float32), files, mesh, DEFAULT_RULES, ignore=model.ignored_weights)
    return model, params, np.load(folder / "golden.npz")


def backend_for(model, name):
    """A backend of BACKENDS with the rules of a model's experts."""
    activation = Activation() if model.moe is None else model.moe.activation
    return dataclasses.replace(BACKENDS[name], expert=Expert(activation))


def empty_caches(model):
    """Caches that a `WholeSequence` hands back as they are."""
    return [
        dict.fromkeys(dict(layer.arrays)) if isinstance(layer, StateCache) else None
        for layer in model.cache_layout(jnp.float32).layers
    ]


@functools.cache
def compiled(model, backend):
    def run(params, token_ids, num_tokens):
        is_token = jnp.arange(ROWS) < num_tokens
        positions = jnp.where(is_token, jnp.arange(ROWS), 0)
        hidden, _ = model.forward(params, token_ids, positions, is_token, empty_caches(model), WholeSequence(), backend)
        return hidden, model.logits(params, hidden)

    return jax.jit(run)


def forward(model, params, prompt, backend, garbage=7):
    """Hidden states and logits of one prompt; the rows after it hold a token that is not part of it."""
    token_ids = np.full(ROWS, garbage, np.int32)
    token_ids[: len(prompt)] = prompt
    hidden, logits = compiled(model, backend)(params, token_ids, len(prompt))
    return hidden[: len(prompt)], logits[: len(prompt)]
