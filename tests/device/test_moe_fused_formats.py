"""The fused kernel as a backend for layers with biases, other activations and quantised experts; and what the loader gives it."""

import dataclasses

import jax
import numpy as np
import pytest
from moe_formats import HIDDEN, INNER, NUM_EXPERTS, NUM_PADDING, config_of, filled_up, layer

from tpu_serve.config import MoEOptions
from tpu_serve.device.chip import cpu_chip
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.device.mesh import make_mesh
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.fused_moe_v2.quantise import pad
from tpu_serve.kernels.fused_moe_v2.tolerance import errors, tolerance
from tpu_serve.layers.moe.backends import choose_backend
from tpu_serve.moe_plan.layer import MoELayer, Policy, kernel_shapes, problem_of


@pytest.mark.parametrize(
    ("format", "activation", "has_biases"),
    [("bfloat16", "swigluoai", True), ("int8_channel", "gelu_tanh", True), ("fp8_block128", "silu", False)],
)
def test_equals_the_loop_on_two_devices(format, activation, has_biases):
    """Its rows are quantised in 8-bit formats, so it is as near as the kernel promises to be there."""
    config = config_of(format, activation, has_biases)
    wanted = layer(format, activation, has_biases, "bfloat16", num_tokens=9)
    mesh = make_mesh(jax.devices()[:2])
    backend = choose_backend(MoEOptions("fused"), config, cpu_chip(), mesh, "bfloat16")
    weights = filled_up(wanted.weights, backend.planner.layer, 2)
    out = jax.jit(backend)(*dataclasses.replace(wanted, weights=weights).arguments())
    found = errors(np.asarray(out).astype(np.float64), wanted.expected)
    limits = tolerance(backend.planner.plan(9).problem, is_strict=False)
    assert found.within(limits), (found, limits)
    assert not np.asarray(out[-NUM_PADDING:]).any()


def test_padding_by_the_names_of_axes_gives_the_shapes_but_for_rows_of_scales():
    """Axes of the weights' specs, of which the loader fills up those that a backend names."""
    axes = {
        "gate_up": ("experts", None, "expert_hidden", "expert_inner"),
        "down": ("experts", "expert_inner", "expert_hidden"),
        "gate_up_scale": ("experts", None, None, "expert_inner"),
        "down_scale": ("experts", None, None, "expert_hidden"),
        "gate_up_bias": ("experts", None, None, "expert_inner"),
        "down_bias": ("experts", None, "expert_hidden"),
    }
    config = config_of("fp8_block128", "swigluoai", True)
    backend = choose_backend(MoEOptions("fused"), config, cpu_chip(), make_mesh(jax.devices()[:4]), "bfloat16")
    multiples = {"experts": 4, **backend.padding}
    sizes = {"experts": NUM_EXPERTS, "expert_hidden": HIDDEN, "expert_inner": INNER}
    padded = {name: -(-size // multiples[name]) * multiples[name] for name, size in sizes.items()}
    shapes = kernel_shapes(backend.planner.layer, 4)
    assert shapes.keys() == axes.keys()
    for name, names in axes.items():
        for axis, size in zip(names, shapes[name], strict=True):
            assert axis is None or size == padded[axis], name
    assert shapes["gate_up_scale"][2] == 8, "two blocks of the 256 rows, filled up"
    assert shapes["down_scale"][1] == 2


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize(("hidden", "inner"), [(168, 136), (520, 1100), (1090, 64)])
def test_shapes_are_those_that_weights_are_padded_to(format, hidden, inner):
    form = FORMATS[format]
    moe_layer = MoELayer(1, 1, hidden, inner, format, activation=Activation(), gate_up_bias=True, down_bias=True)
    shapes = {
        "gate_up": (1, 2, hidden, inner), "down": (1, inner, hidden),
        "gate_up_bias": (1, 2, 1, inner), "down_bias": (1, 1, hidden),
    }  # fmt: skip
    if form.scaled:
        shapes["gate_up_scale"] = (1, 2, form.num_blocks(hidden), inner)
        shapes["down_scale"] = (1, form.num_blocks(inner), 1, hidden)
    stored = {name: form.weight if name in ("gate_up", "down") else "float32" for name in shapes}
    weights = ExpertWeights(**{name: np.zeros(shape, np.dtype(stored[name])) for name, shape in shapes.items()})
    padded = pad(weights, problem_of(moe_layer, 1, 3, Policy()))
    assert kernel_shapes(moe_layer, 3) == {name: getattr(padded, name).shape for name in shapes}
