"""The first key that a window shows lies at the end of a block of keys, or at the beginning of the next."""

import numpy as np
import pytest
from test_attention import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, build
from test_attention_windows import SCALE, arrays, plain, run

from tpu_serve.layers.attention import pages_per_block

WIDTH = pages_per_block(PAGE_SIZE) * PAGE_SIZE


@pytest.mark.parametrize("num_queries", [1, 20])
@pytest.mark.parametrize("first", [WIDTH - 1, WIDTH])
def test_windows_that_begin_beside_the_edge_of_a_block(first, num_queries):
    window = 5
    others = [(3, 1)] if num_queries == 1 else []  # queries of one sequence read together, others each for itself
    scheduled, batch = build([(first + window - 1, num_queries), *others], 32, 8, np.random.default_rng(1))
    q, k, v, cache = arrays(32, 2)
    out, _ = run(q, k, v, cache, batch, scale=SCALE, window=window)
    at = 0
    for item in scheduled:
        stop = at + item.length
        old = cache[item.sequence.pages[0]].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[: item.start]
        keys, values = np.concatenate([old[:, ::2], k[at:stop]]), np.concatenate([old[:, 1::2], v[at:stop]])
        expected = plain(q[at:stop], keys, values, item.start, window, np.full(HEADS, -np.inf))
        np.testing.assert_allclose(out[at:stop], expected, atol=3e-5)
        at = stop
