"""Ways to change one thing of a model: each gives a function that takes the model and its weights and gives both, changed."""

import dataclasses

import jax
import jax.numpy as jnp
from cases import FIXTURES

from tpu_serve.hf_config import read_config
from tpu_serve.models.registry import build_model


def weight(path, change):
    """Changes the weight `path` ("attention.q_proj_bias") of every layer that has it, or that of the whole model ("norm")."""
    *parents, last = path.split(".")

    def mutate(model, params):
        params = jax.tree.map(lambda leaf: leaf, params)
        found = 0
        for tree in (params, *params["layers"]):
            for name in parents:
                tree = tree.get(name, {})
            if last in tree:
                tree[last] = change(tree[last])
                found += 1
        assert found, path
        return model, params

    return mutate


def swapped(path, one, other):
    """Two weights of equal shape in each other's place, in every layer that has them."""

    def mutate(model, params):
        params = jax.tree.map(lambda leaf: leaf, params)
        found = [layer[path] for layer in params["layers"] if path in layer]
        assert found, path
        for tree in found:
            tree[one], tree[other] = tree[other], tree[one]
        return model, params

    return mutate


def sizes(**changes):
    """Changes fields of the model: each to what a function makes of it."""

    def mutate(model, params):
        made = {name: change(getattr(model, name)) for name, change in changes.items()}
        return dataclasses.replace(model, **made), params

    return mutate


def moe(**values):
    return sizes(moe=lambda config: dataclasses.replace(config, **values))


def activation(**values):
    return sizes(
        moe=lambda config: dataclasses.replace(config, activation=dataclasses.replace(config.activation, **values))
    )


def config(fixture, **overrides):
    """The model of another config.json."""
    return lambda model, params: (build_model(read_config(FIXTURES / fixture, overrides)), params)


def each_window(change):
    return sizes(windows=lambda windows: tuple(window and change(window) for window in windows))


def each_layer(**changes):
    """Changes fields of every entry of `model.layers`."""

    def change(one):
        return dataclasses.replace(one, **{name: made(getattr(one, name)) for name, made in changes.items()})

    return sizes(layers=lambda layers: tuple(map(change, layers)))


def without(*paths):
    """Mutations that zero one weight each."""
    return {f"{path} is zero": weight(path, jnp.zeros_like) for path in paths}


def neutral(*paths):
    """Mutations that make one norm multiply by 1."""
    return {f"{path} is one": weight(path, jnp.ones_like) for path in paths}


def concatenated(gate_up):
    """[E, 2, H, I] read as if the columns of a tensor [E, H, 2I], which are interleaved, were all gates and then all ups."""
    num_experts, _, hidden, inner = gate_up.shape
    stored = gate_up.transpose(0, 2, 3, 1).reshape(num_experts, hidden, 2, inner)
    return stored.swapaxes(1, 2)


def gates_behind_queries(q_proj, head_dim=32):
    """Columns that hold query and gate of one head after the other, read as if all queries came first."""
    hidden, num_columns = q_proj.shape
    return q_proj.reshape(hidden, 2, num_columns // 2 // head_dim, head_dim).swapaxes(1, 2).reshape(hidden, num_columns)


def delta_net(**values):
    return sizes(delta_net=lambda layer: dataclasses.replace(layer, **values))
