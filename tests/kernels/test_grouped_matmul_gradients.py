"""Gradients of grouped products on a simulated device: against loops in float64, and against jax.grad of the plain formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_matmul_reference import ERROR, error, input_gradient, normal, weight_gradient
from simulator import Simulation, simulate

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.fused_moe_v2.tile import activate
from tpu_serve.kernels.grouped_matmul import weight_gradient as kernel
from tpu_serve.kernels.grouped_matmul.config import MAX_PANEL, Config
from tpu_serve.kernels.grouped_matmul.op import grouped_gate_up, grouped_matmul
from tpu_serve.kernels.grouped_matmul.problem import Problem
from tpu_serve.kernels.grouped_matmul.products import pull_activation

CPU = cpu_chip()
ROWS, EXPERTS, N_IN, N_OUT = 42, 5, 128, 256
SIZES = np.array([3, 0, 20, 1, 12], np.int32)  # 36 of 42 rows, an empty group, groups that share a tile of 16


def plain(lhs, weights, sizes, activation=None, offset=0):
    """The formula in float32, each row with every matrix and then its own; zero for rows in no group."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(len(lhs))
    group = jnp.sum(row[:, None] >= ends, axis=1) - offset
    mine = jax.nn.one_hot(group, len(weights))
    products = jnp.einsum("rn,ezno,re->zro", lhs, weights, mine, precision="highest")
    return products[0] if activation is None else activate(products[0], products[1], activation)


def test_the_gradients_of_weights_and_rows(monkeypatch):
    """The weight gradient in tiles of both sizes and in panels, with NaN in all foreign rows of both inputs."""
    monkeypatch.setattr(kernel, "MAX_IN_PANEL", 128)
    monkeypatch.setitem(MAX_PANEL, "float32", 128)
    n_in = 512
    lhs, dout = normal(0, (ROWS, n_in)), normal(1, (2, ROWS, N_OUT))
    problem = Problem(ROWS, EXPERTS, n_in, N_OUT, "float32", num_matrices=2, role="weight_gradient")

    def run(interpret, lhs, dout, sizes):
        config = Config(16, 256, tile_in=256)
        return kernel.weight_gradient(problem, config, Context(CPU, interpret), lhs, dout, sizes, 1)

    simulation = Simulation(run)
    for sizes in ([2, 3, 0, 20, 1, 12], [5, 0, 0, 0, 0, 0], [0, 0, 0, 42, 0, 0], [1, 0, 15, 0, 16, 10]):
        own = slice(sizes[0], sum(sizes[:6]))
        spoiled = [np.full_like(lhs, np.nan), np.full_like(dout, np.nan)]
        spoiled[0][own], spoiled[1][:, own] = lhs[own], dout[:, own]
        wanted = weight_gradient(lhs, dout, np.array(sizes), 1, EXPERTS)
        for out in simulation.run(*spoiled, np.array(sizes, np.int32)):
            assert error(out, wanted) < ERROR["float32"]
            assert not np.asarray(out)[np.array(sizes[1:6]) == 0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_product_into_an_existing_array(dtype):
    """NaN in foreign rows of lhs and of the result's gradient reaches neither gradient; those of the existing array get theirs through."""
    offset, sizes = 1, np.array([5, 3, 0, 20, 2, 12], np.int32)
    lhs, rhs = normal(0, (ROWS, N_IN), dtype), normal(1, (4, N_IN, N_OUT), dtype)
    existing, dout = normal(2, (ROWS, N_OUT), dtype), normal(3, (ROWS, N_OUT), dtype)
    own = slice(5, 30)
    spoiled = np.full_like(lhs, np.nan)
    spoiled[own] = lhs[own]
    dout[2] = np.nan

    def run(interpret, lhs, rhs, sizes, existing, dout):
        context = Context(CPU, interpret)

        def product(lhs, rhs, existing):
            return grouped_matmul(lhs, rhs, sizes, context, group_offset=jnp.int32(offset), existing=existing)

        _, pull = jax.vjp(product, lhs, rhs, existing)
        return pull(dout)

    for dlhs, drhs, dexisting in simulate(run, spoiled, rhs, sizes, existing, dout, allow_nan=True):
        assert dlhs.dtype == drhs.dtype == dexisting.dtype == lhs.dtype
        assert error(dlhs, input_gradient(dout[None], rhs[:, None], sizes, offset)) < ERROR[dtype]
        assert error(drhs, weight_gradient(lhs, dout[None], sizes, offset, 4)[:, 0]) < ERROR[dtype]
        through = dout.copy()
        through[own] = 0
        np.testing.assert_array_equal(np.asarray(dexisting).astype(np.float32), through.astype(np.float32))


@pytest.mark.parametrize(
    ("activation", "modes"),
    [(Activation("silu"), ("on_wait", "eager")), (Activation("swigluoai", limit=1.5), ("eager",))],
)
def test_of_gate_and_up(activation, modes):
    lhs, gate_up = normal(0, (ROWS, N_IN)), normal(1, (EXPERTS, 2, N_IN, N_OUT), scale=0.1)
    share = normal(2, (ROWS, N_OUT))

    def loss(product, lhs, gate_up):
        own = (jnp.arange(ROWS) < SIZES.sum())[:, None]
        return jnp.sum(jnp.where(own, product(lhs, gate_up), 0.0) * share)

    def run(interpret, lhs, gate_up, sizes):
        context = Context(CPU, interpret)
        return jax.grad(functools.partial(loss, lambda *a: grouped_gate_up(*a, sizes, activation, context)), (0, 1))(
            lhs, gate_up
        )

    wanted = jax.grad(functools.partial(loss, lambda *a: plain(*a, SIZES, activation)), (0, 1))(lhs, gate_up)
    assert all(np.abs(np.asarray(one)).max() > 0.1 for one in wanted)
    for got in simulate(run, lhs, gate_up, SIZES, modes=modes):
        for one, other in zip(got, wanted, strict=True):
            assert error(one, other) < 5e-5


def test_of_two_layers_in_a_scan_with_rematerialisation():
    """As a model does it: layers in a scan, each made again for its backward pass; every row has its group."""
    layers, sizes, activation = 2, np.array([5, 0, 11], np.int32), Activation()
    x = normal(0, (16, N_IN))
    gate_up, down = normal(1, (layers, 3, 2, N_IN, 128), scale=0.1), normal(2, (layers, 3, 128, N_IN), scale=0.1)

    def loss(two, one, x, gate_up, down):
        @jax.checkpoint
        def layer(x, weights):
            return x + one(two(x, weights[0]), weights[1]), None

        return jnp.sum(jax.lax.scan(layer, x, (gate_up, down))[0] ** 2)

    # The simulator does not run below jax.checkpoint; the plain interpreter does.
    context = Context(CPU, True)
    two = lambda x, weights: grouped_gate_up(x, weights, sizes, activation, context)  # noqa: E731
    one = lambda x, weights: grouped_matmul(x, weights, sizes, context)  # noqa: E731
    got = jax.jit(jax.grad(functools.partial(loss, two, one), (0, 1, 2)))(x, gate_up, down)
    two = lambda x, weights: plain(x, weights, sizes, activation)  # noqa: E731
    one = lambda x, weights: plain(x, weights[:, None], sizes)  # noqa: E731
    wanted = jax.grad(functools.partial(loss, two, one), (0, 1, 2))(x, gate_up, down)
    for mine, other in zip(got, wanted, strict=True):
        assert error(mine, other) < 5e-5


def test_the_activation_pulls_to_gate_first():
    gate, up, dout = (normal(seed, (4, 8)) for seed in range(3))
    got = pull_activation(jnp.asarray(gate), jnp.asarray(up), Activation("gelu_tanh"), jnp.asarray(dout))
    step = 1e-2
    for index, direction in enumerate(((1, 0), (0, 1))):
        values = [
            activate(gate + sign * step * direction[0], up + sign * step * direction[1], Activation("gelu_tanh"))
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(got[index], dout * (values[0] - values[1]) / (2 * step), atol=2e-3)
