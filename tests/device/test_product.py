"""Products of tokens and weights on this platform against float64, rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.layers.product import product, rows_of, table_product


def drawn(*shape, dtype="bfloat16", seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def wide(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 24), (5, 24), (2, 3, 24), (24,)])
def test_products(shape, dtype):
    x, weight = drawn(*shape, dtype=dtype), drawn(24, 10, dtype=dtype)
    found = jax.jit(product)(x, weight)
    assert found.dtype == x.dtype
    error = 0.005 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(wide(found), wide(x) @ wide(weight), rtol=error, atol=error)
    logits = jax.jit(table_product)(x, weight.T)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, wide(x) @ wide(weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_those_of_the_table_bit_for_bit(dtype):
    table, index = drawn(7, 4, dtype=dtype), jnp.array([[6, 0], [3, 3]])
    found = jax.jit(rows_of)(table, index)
    assert found.dtype == table.dtype
    np.testing.assert_array_equal(wide(found), wide(table)[np.asarray(index)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients(dtype):
    """Of everything that is taken as bits or in another form on some platform: none is lost."""
    x, weight, index = drawn(1, 24, dtype=dtype), drawn(24, 10, dtype=dtype), jnp.array([[6, 0], [3, 3]])

    for multiply in (product, lambda x, weight: table_product(x, weight.T)):
        total = lambda x, weight, multiply=multiply: multiply(x, weight).astype(jnp.float32).sum()  # noqa: E731
        of_x, of_weight = jax.jit(jax.grad(total, (0, 1)))(x, weight)
        np.testing.assert_allclose(wide(of_x), wide(weight).sum(axis=1)[None], rtol=0.01, atol=0.01)
        np.testing.assert_array_equal(wide(of_weight), np.broadcast_to(wide(x).T, weight.shape))
    found = jax.jit(jax.grad(lambda table: rows_of(table, index).astype(jnp.float32).sum()))(weight)
    counts = np.bincount(np.ravel(index), minlength=24)[:, None]
    np.testing.assert_array_equal(wide(found), np.broadcast_to(counts, weight.shape))


@pytest.mark.parametrize("num_rows", [1, 8])
def test_no_weight_is_converted_on_a_cpu(num_rows):
    """Which costs as much as many products."""
    text = jax.jit(product).lower(drawn(num_rows, 256), drawn(256, 512)).compile().as_text()
    assert "f32[256,512]" not in text
    assert "bf16[256,512]" in text
