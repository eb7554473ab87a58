"""Layers in every number format with what they must give: a loop over tokens in float64, from the formulas of the activations."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise, quantise
from tpu_serve.layers.moe.routing import MoEConfig, Routing
from tpu_serve.moe_plan.layer import kernel_shapes

ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": Activation("swigluoai", limit=1.5, alpha=1.3),
}

# Blocks of 128 and 32 end within both.
HIDDEN, INNER, NUM_EXPERTS, TOP_K, NUM_TOKENS, NUM_PADDING = 168, 136, 6, 3, 21, 4


def config_of(format, activation="silu", has_biases=False):
    stored = FORMATS[format]
    return MoEConfig(
        NUM_EXPERTS, TOP_K, HIDDEN, INNER, True,
        format=format if stored.scaled else None, has_biases=has_biases, activation=ACTIVATIONS[activation],
    )  # fmt: skip


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def activated(name, gate, up):
    rule = ACTIVATIONS[name]
    if name == "silu":
        return gate * sigmoid(gate) * up
    if name == "gelu":
        return gate * np.array([(1 + math.erf(one / math.sqrt(2))) / 2 for one in gate]) * up
    if name == "gelu_tanh":
        return gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, rule.limit), np.clip(up, -rule.limit, rule.limit)
    return (up + 1) * (gate * sigmoid(rule.alpha * gate))


@dataclasses.dataclass
class Layer:
    """x, routing and weights as arrays on the host, and the result f64[T, H], where padding rows are zeros."""

    x: np.ndarray
    routing: Routing
    weights: ExpertWeights
    expected: np.ndarray

    def arguments(self):
        return jax.tree.map(jnp.asarray, (self.x, self.routing, self.weights))


def layer(format, activation="silu", has_biases=False, dtype="float32", seed=0, num_tokens=NUM_TOKENS):
    """Values are large enough for the clamp of swigluoai to cut some of them, and padding rows hold large numbers."""
    rng = np.random.default_rng(seed)
    sizes = (NUM_EXPERTS, 2, HIDDEN, INNER), (NUM_EXPERTS, INNER, HIDDEN)
    gate_up, down = (rng.normal(0, 1.5 * shape[-2] ** -0.5, shape).astype(np.float32) for shape in sizes)
    biases = {}
    if has_biases:
        biases = {
            "gate_up_bias": rng.normal(0, 1, (NUM_EXPERTS, 2, 1, INNER)).astype(np.float32),
            "down_bias": rng.normal(0, 1, (NUM_EXPERTS, 1, HIDDEN)).astype(np.float32),
        }
    weights = quantise(ExpertWeights(gate_up, down, **biases), FORMATS[format])
    ids = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < 0.15] = -1
    shares = rng.random(ids.shape).astype(np.float32)  # also where there is no expert: only the id decides
    x = rng.normal(0, 1, (num_tokens, HIDDEN)).astype(jnp.dtype(dtype))
    ids[-NUM_PADDING:], shares[-NUM_PADDING:], x[-NUM_PADDING:] = -1, 0, 1e3
    plain = dequantise(weights, FORMATS[format])
    return Layer(x, Routing(shares, ids), weights, _loop(x, ids, shares, plain, activation))


def _loop(x, ids, shares, weights, activation):
    arrays = dataclasses.asdict(weights)
    wide = {name: np.asarray(array, np.float64) for name, array in arrays.items() if array is not None}
    out = np.zeros(x.shape)
    for token, row in enumerate(np.asarray(x, np.float64)):
        for expert, share in zip(ids[token], shares[token], strict=True):
            if expert < 0:
                continue
            gate, up = row @ wide["gate_up"][expert, 0], row @ wide["gate_up"][expert, 1]
            if "gate_up_bias" in wide:
                gate, up = gate + wide["gate_up_bias"][expert, 0, 0], up + wide["gate_up_bias"][expert, 1, 0]
            done = activated(activation, gate, up) @ wide["down"][expert]
            if "down_bias" in wide:
                done = done + wide["down_bias"][expert, 0]
            out[token] += share * done
    return out


def filled_up(weights, moe_layer, num_devices, scale=7.0):
    """The weights in the shapes that the fused kernel asks for, with something in the filling of scales."""
    grown = {}
    for name, shape in kernel_shapes(moe_layer, num_devices).items():
        array = np.asarray(getattr(weights, name))
        grown[name] = np.full(shape, scale if name.endswith("_scale") else 0, array.dtype)
        grown[name][tuple(map(slice, array.shape))] = array
    return ExpertWeights(**grown)
