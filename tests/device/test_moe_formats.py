"""Every backend in XLA's operations, with every activation, with and without biases, in the number formats of experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_formats import HIDDEN, NUM_EXPERTS, NUM_PADDING, config_of, filled_up, layer

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.device.experts import ExpertWeights
from tpu_serve.device.mesh import make_mesh
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.layers.moe.backends import Dense, Ragged, choose_backend, layer_of
from tpu_serve.layers.moe.expert import Expert
from tpu_serve.layers.moe.expert_parallel import ExpertParallel
from tpu_serve.layers.moe.grouped import Grouped
from tpu_serve.layers.moe.routing import Routing

FORMAT_NAMES = ("float32", "bfloat16", "fp8_channel", "fp8_block128", "int8_channel", "w8a16", "mxfp4")
MAKERS = {
    "dense": Dense,
    "row blocks": lambda expert: Ragged(False, expert),
    "ragged_dot": lambda expert: Ragged(True, expert),
    "grouped": lambda expert: Grouped("auto", "auto", "auto", cpu_chip(), expert),
}


def backend_of(name, config):
    return MAKERS[name](Expert(config.activation, config.format))


def mesh(num_devices):
    return make_mesh(jax.devices()[:num_devices])


def assert_close(out, expected, dtype="float32"):
    """Relative to the largest value; in bfloat16 an expert's weights, inner values and rows are rounded on the way."""
    out = np.asarray(out, np.float64)
    limit = (1e-5 if dtype == "float32" else 2e-2) * np.abs(expected).max()
    np.testing.assert_allclose(out[:-NUM_PADDING], expected[:-NUM_PADDING], rtol=0, atol=limit)
    assert not out[-NUM_PADDING:].any(), "padding rows"


def check(name, format, activation, has_biases):
    dtype = "bfloat16" if format == "bfloat16" else "float32"
    wanted = layer(format, activation, has_biases, dtype)
    out = jax.jit(backend_of(name, config_of(format, activation, has_biases)))(*wanted.arguments())
    assert out.dtype == jnp.dtype(dtype)
    assert_close(out, wanted.expected, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("name", MAKERS)
def test_activations_and_biases(name, activation):
    check(name, "float32", activation, has_biases=activation in ("silu", "swigluoai") and name != "grouped")


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("format", FORMAT_NAMES[1:])
def test_activations_and_biases_in_every_format(format, activation, has_biases):
    """Each combination by one backend: they share what is done to a format, and so each gets every format."""
    names = [name for name in MAKERS if not (has_biases and name == "grouped")]
    number = FORMAT_NAMES.index(format) + ["silu", "gelu_tanh", "swigluoai"].index(activation)
    check(names[number % len(names)], format, activation, has_biases)


@pytest.mark.parametrize(
    ("name", "format"), [("dense", "mxfp4"), ("row blocks", "fp8_block128"), ("ragged_dot", "int8_channel")]
)
def test_tokens_in_bfloat16(name, format):
    wanted = layer(format, "swigluoai", True, "bfloat16", num_tokens=60)
    out = jax.jit(backend_of(name, config_of(format, "swigluoai", True)))(*wanted.arguments())
    assert out.dtype == jnp.bfloat16
    assert_close(out, wanted.expected, "bfloat16")


@pytest.mark.parametrize(
    ("name", "format", "activation", "has_biases", "num_devices"),
    [
        ("dense", "mxfp4", "swigluoai", True, 4),
        ("row blocks", "mxfp4", "swigluoai", True, 4),
        ("row blocks", "fp8_block128", "silu", False, 2),
        ("ragged_dot", "mxfp4", "swigluoai", True, 2),
        ("ragged_dot", "int8_channel", "gelu_tanh", True, 4),
        ("grouped", "fp8_block128", "gelu_tanh", False, 4),
    ],
)
def test_split_over_devices(name, format, activation, has_biases, num_devices):
    """Six experts on four devices are two each, the last device has none of the model's."""
    config, wanted = config_of(format, activation, has_biases), layer(format, activation, has_biases)
    missing = -NUM_EXPERTS % num_devices
    weights = jax.tree.map(lambda one: np.pad(one, [(0, missing)] + [(0, 0)] * (one.ndim - 1)), wanted.weights)
    run = jax.jit(ExpertParallel(backend_of(name, config), mesh(num_devices)))
    assert_close(run(*dataclasses.replace(wanted, weights=weights).arguments()), wanted.expected)


@pytest.mark.parametrize(
    ("format", "num_devices"), [("bfloat16", 1), ("mxfp4", 1), ("mxfp4", 4), ("fp8_block128", 2), ("int8_channel", 4)]
)
def test_weights_that_are_filled_up_for_the_kernel(format, num_devices):
    """Steps that the kernel does not take have its shapes; rows of scales beyond the blocks are not read at all."""
    config, wanted = config_of(format, "swigluoai", True), layer(format, "swigluoai", True)
    backend = choose_backend(MoEOptions("ragged"), config, cpu_chip(), mesh(num_devices), "float32")
    weights = filled_up(wanted.weights, layer_of(config, "float32"), num_devices)
    assert weights.gate_up.shape[2:] == (256, 256)
    if FORMATS[format].block is not None:
        assert weights.gate_up_scale.shape[2] == 8
        weights.gate_up_scale[:, :, FORMATS[format].num_blocks(256) :] = np.nan
    out = jax.jit(backend)(*dataclasses.replace(wanted, weights=weights).arguments())
    assert_close(out, wanted.expected)


@pytest.mark.parametrize("name", MAKERS)
def test_what_padding_rows_hold_touches_no_token(name):
    """Of a dense layer not even NaN: its padding rows are worth nothing, and those of the others are zeros."""
    config, wanted = config_of("fp8_channel"), layer("fp8_channel")
    run = jax.jit(backend_of(name, config))
    first = np.asarray(run(*wanted.arguments()))
    wanted.x[-NUM_PADDING:] = np.nan
    second = np.asarray(run(*wanted.arguments()))
    np.testing.assert_array_equal(second[:-NUM_PADDING], first[:-NUM_PADDING])
    if name != "dense":
        assert not second[-NUM_PADDING:].any()


@pytest.mark.parametrize("name", ["dense", "row blocks", "ragged_dot"])
def test_no_expert_gets_no_bias(name):
    config, wanted = config_of("float32", "swigluoai", True), layer("float32", "swigluoai", True)
    wanted.routing.expert_ids[:] = -1
    wanted.routing.weights[:] = 0.5
    assert not np.asarray(jax.jit(backend_of(name, config))(*wanted.arguments())).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_without_any_of_it_are_products_and_silu(dtype):
    """Unquantised experts: each block of rows goes through three products. Float32 agrees bit for bit; bfloat16 is rounded between the products
    and at the end, which is less often than this reference does."""
    wanted = layer(dtype, dtype=dtype)
    x, routing, weights = wanted.arguments()

    @jax.jit
    def of_expert(rows, gate, up, down):
        return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

    @jax.jit
    def summed(rows, shares, ids):
        return jnp.sum(jnp.where((ids >= 0)[..., None], rows.astype(jnp.float32) * shares[..., None], 0.0), axis=1)

    ids, rows = wanted.routing.expert_ids, np.zeros((*wanted.routing.expert_ids.shape, HIDDEN), x.dtype)
    for expert in range(NUM_EXPERTS):
        places = np.argwhere(ids == expert)
        for first in range(0, len(places), 16):  # rows of a block, for this many assignments
            token, choice = places[first : first + 16].T
            block = jnp.zeros((16, HIDDEN), x.dtype).at[: len(token)].set(x[token])
            done = of_expert(block, weights.gate_up[expert, 0], weights.gate_up[expert, 1], weights.down[expert])
            rows[token, choice] = done[: len(token)]
    expected = summed(rows, routing.weights, routing.expert_ids).astype(x.dtype)
    result = jax.jit(Ragged(chip_is_tpu=False))(x, routing, weights)
    if dtype == "float32":
        np.testing.assert_array_equal(result, expected)
        return
    exact = jax.jit(Ragged(chip_is_tpu=False))(
        x.astype(jnp.float32), routing, jax.tree.map(lambda one: one.astype(jnp.float32), weights)
    )
    off = lambda found: float(jnp.sqrt(jnp.mean((found.astype(jnp.float32) - exact) ** 2)))  # noqa: E731
    assert off(result) < off(expected) < 0.01 * float(jnp.sqrt(jnp.mean(exact**2)))


@pytest.mark.parametrize("format", ["fp8_block128", "int8_channel", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_one_expert_is_widened_at_a_time(format, dtype):
    form, num_experts, hidden, inner = FORMATS[format], 16, 256, 512
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))  # noqa: E731
    weights = ExpertWeights(
        shape(num_experts, 2, hidden, inner, dtype=form.weight),
        shape(num_experts, inner, hidden, dtype=form.weight),
        shape(num_experts, 2, form.num_blocks(hidden), inner, dtype="float32"),
        shape(num_experts, form.num_blocks(inner), 1, hidden, dtype="float32"),
    )
    routing = Routing(shape(8, 2, dtype="float32"), shape(8, 2, dtype="int32"))
    run = jax.jit(Ragged(False, Expert(format=format)))
    compiled = run.lower(shape(8, hidden), routing, weights).compile()
    one_expert_in_float32 = 3 * hidden * inner * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * one_expert_in_float32


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_grouped_lacks_is_refused(num_devices):
    with pytest.raises(ConfigError, match="--moe-backend grouped cannot run this model: grouped adds no biases"):
        choose_backend(
            MoEOptions("grouped"), config_of("mxfp4", has_biases=True), cpu_chip(), mesh(num_devices), "float32"
        )


def test_scales_that_do_not_fit_the_format_are_an_error():
    wanted = layer("fp8_block128")
    with pytest.raises(ValueError, match="weights with scales need a format that has such, not None"):
        Dense()(*wanted.arguments())
    with pytest.raises(ValueError, match="168 rows of format mxfp4 have 6 scales a column, got 2"):
        Dense(Expert(format="mxfp4"))(*wanted.arguments())


def test_an_unknown_format_is_refused():
    config = dataclasses.replace(config_of("mxfp4"), format="fp9")
    with pytest.raises(ConfigError, match="number format 'fp9' is unknown; supported are float32, bfloat16"):
        choose_backend(MoEOptions(), config, cpu_chip(), mesh(1), "float32")


def test_the_plan_is_about_the_layer_as_it_is():
    config = dataclasses.replace(config_of("int8_channel", "swigluoai", True), hidden=2048, intermediate=768)
    planner = choose_backend(MoEOptions(), config, TPU_CHIPS["v6e"], mesh(2), "bfloat16").planner
    problem = planner.plan(64).problem
    assert (problem.format, problem.dtype) == ("int8_channel", "bfloat16")
    assert problem.activation == Activation("swigluoai", limit=1.5, alpha=1.3)
    assert problem.gate_up_bias
    assert problem.down_bias
    assert {planner.plan(tokens).path for tokens in (1, 300, 4096)} == {"fused"}
    # Products in float8 are not this chip's: XLA widens.
    config = dataclasses.replace(config, format="fp8_channel")
    made = choose_backend(MoEOptions(), config, TPU_CHIPS["v6e"], mesh(2), "bfloat16").planner.plan(64)
    assert made.path == "ragged"
    assert "not fused: format fp8_channel has products in float8_e4m3fn, which v6e has no arithmetic for" in made.reason
    with pytest.raises(ConfigError, match=r"--moe-backend fused cannot run this model: .* format mxfp4 stores float4"):
        choose_backend(
            MoEOptions("fused"),
            dataclasses.replace(config, format="mxfp4"),
            TPU_CHIPS["v6e"],
            mesh(2),
            "bfloat16",
        )
