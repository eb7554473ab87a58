"""Gradients of combine and permute through every backend, the kernels on a simulated device, against loops."""

import functools

import jax
import jax.numpy as jnp
import moe_combine_reference as reference
import numpy as np
import pytest
from moe_combine_inputs import Case, normal, simulated
from simulator import simulate

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine.op import BACKENDS, Choice, combine, permute

CASE = Case(150, 2, 6, 128, 128, align=8, spare_rows=40)


def run(backend, function, *arrays):
    """Outputs of `function(choice, *arrays)`: of both simulated orders of copies for the kernels."""

    def call(interpret, *arrays):
        return function(Choice(backend, Context(TPU_CHIPS["v6e"], interpret), CASE.num_experts), *arrays)

    if backend == "tc":
        return simulate(call, *arrays, allow_nan=True)
    return [jax.jit(functools.partial(call, False))(*arrays)]


def scale_of(ids, rows, tokens):
    """How large the terms are of which the gradient of a weight is the sum."""
    return reference.dots(np.abs(rows), ids, np.abs(tokens)).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_combine_with_bfloat16_weights(backend):
    """The gradient of rows is a product rounded once, hence the same bits everywhere; that of rows of no choice is zero."""
    ids, rows = CASE.ids(), CASE.rows(CASE.ids())
    weights, gradient = normal(5, ids.shape, "bfloat16"), CASE.tokens()

    def pull(choice, rows, ids, weights, gradient):
        out, back = jax.vjp(lambda rows, weights: combine(rows, ids, weights, choice), rows, weights)
        return out, back(gradient)

    for out, (by_rows, by_weights) in run(backend, pull, rows, ids, weights, gradient):
        exact = reference.combine(rows, ids, weights)
        sizes = reference.combine(np.abs(rows), ids, np.abs(weights))
        off = np.abs(np.asarray(out, np.float64) - exact)
        assert np.all(off <= reference.bfloat16_step(exact) * 0.5 + sizes * 2.0**-20)
        assert by_rows.dtype == by_weights.dtype == jnp.bfloat16
        np.testing.assert_array_equal(by_rows, reference.permute(gradient, ids, weights, len(rows)))
        exact = reference.dots(rows, ids, gradient)
        error = np.abs(np.asarray(by_weights, np.float64) - exact)
        assert np.all(error <= 1e-2 * np.abs(exact) + 1e-6 * scale_of(ids, rows, gradient))


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_combine_with_float32_weights_recomputed_in_a_loop(backend):
    """Two layers in `lax.scan`, nothing kept between forward and backward but their inputs.

    A simulated kernel cannot be recomputed, since it calls back to Python: tests/aot compiles that of the real one.
    """
    ids = np.stack([CASE.ids(seed) for seed in (0, 1)])
    rows = np.stack([CASE.rows(ids[seed], seed) for seed in (0, 1)])
    weights = np.stack([CASE.weights(seed) for seed in (0, 1)])
    gradient = CASE.tokens()

    def pull(choice, rows, ids, weights, gradient):
        def layer(rows, ids, weights):
            return combine(rows, ids, weights, choice).astype(jnp.float32)

        again = layer if backend == "tc" else jax.checkpoint(layer)

        def loss(rows, weights):
            def body(total, one):
                return total + jnp.sum(again(*one) * gradient.astype(jnp.float32)), None

            return jax.lax.scan(body, jnp.float32(0), (rows, ids, weights))[0]

        return jax.grad(loss, (0, 1))(rows, weights)

    for by_rows, by_weights in run(backend, pull, rows, ids, weights, gradient):
        assert by_rows.dtype == jnp.bfloat16
        assert by_weights.dtype == jnp.float32
        for layer in (0, 1):
            count = np.sum(ids[layer] >= 0)
            exact = reference.permute(gradient.astype(np.float64), ids[layer], weights[layer], rows.shape[1])
            off = np.abs(np.asarray(by_rows[layer], np.float64) - exact)
            assert np.all(off <= reference.bfloat16_step(exact) * 0.51)
            assert not np.asarray(by_rows[layer, count:], np.float32).any()
            exact = reference.dots(rows[layer], ids[layer], gradient)
            scale = scale_of(ids[layer], rows[layer], gradient)
            np.testing.assert_allclose(by_weights[layer], exact, rtol=1e-4, atol=1e-6 * scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_permute(backend):
    """A token gets the sum of its rows' gradients; what arrives at rows of no choice goes nowhere, be it NaN."""
    ids, tokens = CASE.ids(), CASE.tokens()
    gradient = CASE.rows(ids, 7)

    def pull(choice, tokens, ids, gradient):
        out, back = jax.vjp(lambda tokens: permute(tokens, ids, choice, len(gradient)), tokens)
        return out, back(gradient)

    count = np.sum(ids >= 0)
    for out, (by_tokens,) in run(backend, pull, tokens, ids, gradient):
        np.testing.assert_array_equal(out[:count], reference.permute(tokens, ids, None, count))
        exact = reference.combine(gradient, ids, None)
        sizes = reference.combine(np.abs(gradient), ids, None)
        off = np.abs(np.asarray(by_tokens, np.float64) - exact)
        assert np.all(off <= reference.bfloat16_step(exact) * 0.5 + sizes * 2.0**-20)


def test_products_of_tokens_and_rows():
    """In panels of which the last is narrower; NaN of one row stays in its product, and stays out of tokens that do not exist."""
    case = Case(150, 2, 13, 384, 256, "uniform", weight_dtype=None)
    simulation = simulated(case, "dots")
    for seed, routing in enumerate(("uniform", "partial", "by block", "none")):
        ids, tokens = case.ids(seed, routing), case.tokens(seed)
        rows = case.rows(ids, seed)
        exact = reference.dots(rows, ids, tokens)
        for found in simulation.run(rows, ids, tokens):
            assert found.dtype == jnp.float32
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5 * (1 + scale_of(ids, rows, tokens)))
    ids, tokens = case.ids(), case.tokens()
    rows, place = case.rows(ids), reference.rows_of(ids)
    rows[place[3, 1], 300] = np.nan
    rows[place[149, 0]] = np.inf
    for found in simulation.run(rows, ids, tokens, allow_nan=True):
        np.testing.assert_array_equal(np.argwhere(~np.isfinite(found)), [[3, 1], [149, 0]])


@pytest.mark.parametrize("backend", ["onehot", "xla"])
def test_without_a_kernel_what_is_not_finite_stays_with_its_token(backend):
    ids, weights = CASE.ids(routing="uniform"), CASE.weights()
    rows, place = CASE.rows(ids), reference.rows_of(ids)
    weights[9, 0] = 0.0
    spoilt = rows.copy()
    spoilt[place[3, 0]] = np.nan
    spoilt[place[4, 0]] = np.inf
    spoilt[place[9, 0]] = np.inf

    def both(choice, rows, spoilt, ids, weights):
        return combine(rows, ids, weights, choice), combine(spoilt, ids, weights, choice)

    [(clean, found)] = run(backend, both, rows, spoilt, ids, weights)
    np.testing.assert_array_equal(np.argwhere(~np.isfinite(found).all(axis=1))[:, 0], [3, 4])
    others = np.delete(np.arange(len(ids)), [3, 4])
    np.testing.assert_array_equal(found[others], clean[others])
