"""XLA's attention over pages that lie by head, which TPUs have, against the reference of the kernel; the cache against tokens written one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import SCALE, Case, expected, written

from tpu_serve.layers.attention import is_by_head, paged_attention, pages_per_block

CASES = {
    "pairs of heads": Case(4, 2, 8, max_pages=16),
    "one KV head, a window, sinks": Case(7, 1, 16, window=11, has_sinks=True, max_pages=16),
    "a soft cap, bfloat16": Case(6, 2, 128, soft_cap=2.0, dtype="bfloat16", page_size=16, max_pages=8),
    "int8": Case(4, 2, 8, page_size=32, max_pages=4, window=50, stored="int8"),
    "float8_e4m3fn": Case(3, 1, 8, page_size=32, max_pages=4, stored="float8_e4m3fn"),
}
STEPS = {
    "decodes and chunks": [(0, 1), (7, 1), (8, 1), (63, 1), (0, 20), (13, 30), (31, 2)],
    "one chunk of all tokens": [(27, 64)],
}


@functools.cache
def program(case):
    def run(q, k, v, cache, batch):
        return paged_attention(
            q, k, v, cache, batch, SCALE, window=case.window, sinks=case.sinks(), soft_cap=case.soft_cap
        )  # fmt: skip

    return jax.jit(run)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", STEPS)
def test_values_and_cache(name, step):
    case = CASES[name]
    assert case.max_pages % pages_per_block(case.page_size) == 0
    batch, (q, k, v, cache) = case.batch(STEPS[step]), case.arrays(5)
    assert is_by_head(cache, k)
    right = written(case, k, v, cache, batch)
    wanted = expected(case, q, jax.tree.map(jnp.asarray, right), batch)
    out, new = program(case)(q, k, v, cache, batch)
    assert out.dtype == q.dtype
    tolerance = 2e-5 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=tolerance, rtol=tolerance)
    assert not np.asarray(out, np.float32)[int(batch.num_tokens) :].any()
    for found, one in zip(jax.tree.leaves(new), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(found[1:], np.float32), np.asarray(one[1:], np.float32))


def test_by_token_is_the_same_values():
    """The other layout of the same cache gives the same results."""
    case = CASES["pairs of heads"]
    batch, (q, k, v, cache) = case.batch(STEPS["decodes and chunks"]), case.arrays(6)
    heads, size = case.num_kv_heads, case.head_dim
    by_token = cache.reshape(len(cache), heads, case.page_size, 2, size).transpose(0, 2, 1, 3, 4)
    by_token = by_token.reshape(len(cache), case.page_size, 2 * heads, size)
    assert not is_by_head(by_token, k)
    out, _ = program(case)(q, k, v, cache, batch)
    other, _ = program(dataclasses.replace(case))(q, k, v, by_token, batch)
    np.testing.assert_allclose(out, other, atol=1e-6, rtol=1e-6)
