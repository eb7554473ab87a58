"""Sliding windows, sinks and several page tables, against a float64 loop over the same ragged batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import CASES, HEAD_DIM, HEADS, KV_HEADS, NUM_PAGES, PAGE_SIZE, build

from tpu_serve.layers.attention import paged_attention

run = jax.jit(paged_attention, static_argnames=("scale", "window", "table"))
SCALE = 0.3


def plain(q, keys, values, start, window, sinks):
    """Attention of q [L, N, D] at positions start… over keys and values [start + L, K, D]; a head without a sink has -inf."""
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    out = np.zeros_like(q)
    for i in range(len(q)):
        last = start + i + 1
        first = max(0, last - window)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[first:last, kv_head] @ q[i, head] * SCALE
            highest = max(scores.max(), sinks[head])
            weights = np.exp(scores - highest)
            out[i, head] = weights @ values[first:last, kv_head] / (weights.sum() + np.exp(sinks[head] - highest))
    return out


def arrays(num_tokens, seed):
    rng = np.random.default_rng(seed)
    q = rng.normal(0, 1.5, (num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
    k, v = (rng.normal(0, 1.5, (num_tokens, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2))
    cache = rng.normal(0, 1.5, (NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM)).astype(np.float32)
    return q, k, v, cache


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [1, 3, 16, 130, 1000])
@pytest.mark.parametrize("case", ["decodes of many lengths", "second chunk of a long prompt", "decodes and chunks"])
def test_windows_and_sinks(case, window, with_sinks):
    lengths, num_tokens, num_rows = CASES[case]
    scheduled, batch = build(lengths, num_tokens, num_rows, np.random.default_rng(7))
    q, k, v, cache = arrays(num_tokens, 8)
    sinks = np.array([-1.0, 0.5, 2.0, 9.0], np.float32) if with_sinks else np.full(HEADS, -np.inf)
    # What a window has left behind is page 0, where padding writes whatever it likes.
    table = np.array(batch.page_table)
    for row, item in enumerate(scheduled):
        table[:, row, : max(0, item.start - window + 1) // PAGE_SIZE] = 0
    cache[0] = np.nan
    given = type(batch)(**{name: getattr(batch, name) for name in batch.__dataclass_fields__} | {"page_table": table})
    options = {"sinks": jnp.asarray(sinks)} if with_sinks else {}
    out, _ = run(q, k, v, cache, given, scale=SCALE, window=window, **options)
    at = 0
    for item in scheduled:
        stop = at + item.length
        old = cache[item.sequence.pages[0]].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[: item.start]
        keys, values = np.concatenate([old[:, ::2], k[at:stop]]), np.concatenate([old[:, 1::2], v[at:stop]])
        expected = plain(q[at:stop], keys, values, item.start, window, sinks)
        np.testing.assert_allclose(out[at:stop], expected, atol=3e-5)
        at = stop
    np.testing.assert_array_equal(out[at:], np.zeros_like(out[at:]))


def test_sinks_without_a_window():
    lengths, num_tokens, num_rows = CASES["decodes and chunks"]
    scheduled, batch = build(lengths, num_tokens, num_rows, np.random.default_rng(9))
    q, k, v, cache = arrays(num_tokens, 10)
    sinks = np.array([3.0, -2.0, 0.0, 1.0], np.float32)
    out, _ = run(q, k, v, cache, batch, scale=SCALE, sinks=jnp.asarray(sinks))
    item = scheduled[0]
    old = cache[item.sequence.pages[0]].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[: item.start]
    keys, values = np.concatenate([old[:, ::2], k[:1]]), np.concatenate([old[:, 1::2], v[:1]])
    np.testing.assert_allclose(out[:1], plain(q[:1], keys, values, item.start, 1000, sinks), atol=3e-5)


def test_a_layer_uses_the_page_table_of_its_window():
    scheduled, batch = build([(20, 1), (0, 30)], 64, 8, np.random.default_rng(11))
    q, k, v, cache = arrays(64, 12)
    expected, new_cache = run(q, k, v, cache, batch, scale=SCALE)
    unused = jnp.zeros_like(batch.page_table), jnp.zeros_like(batch.kv_index)
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    fields["page_table"] = jnp.concatenate([unused[0], batch.page_table])
    fields["kv_index"] = jnp.concatenate([unused[1], batch.kv_index])
    out, other_cache = run(q, k, v, cache, type(batch)(**fields), scale=SCALE, table=1)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(other_cache, new_cache)
    assert len(scheduled) == 2
