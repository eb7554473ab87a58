"""Paged attention against plain attention in float64 over the same ragged batch."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tpu_serve.layers.attention import paged_attention, pages_per_block
from tpu_serve.request import Request, SamplingParams
from tpu_serve.runner.pack import Packer, PackLayout
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import Scheduled

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES, MAX_PAGES = 4, 2, 8, 8, 700, 48


def plain(q, keys, values, start):
    """Attention of q [L, N, D] at positions start… over keys and values [start + L, K, D]."""
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    out = np.zeros_like(q)
    for i in range(len(q)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[: start + i + 1, kv_head] @ q[i, head] / np.sqrt(HEAD_DIM)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ values[: start + i + 1, kv_head]
    return out


def build(lengths, num_tokens, num_rows, rng):
    """Scheduled rows for (start, length) pairs with pages in random order, as the scheduler would hand them out."""
    free = rng.permutation(np.arange(1, NUM_PAGES)).tolist()
    scheduled = []
    for start, length in lengths:
        params = SamplingParams(max_tokens=1)
        sequence = Sequence(Request(id="x", prompt_token_ids=(3,) * (start + length), params=params), 999)
        sequence.pages = [[free.pop() for _ in range(-(-(start + length) // PAGE_SIZE))]]
        sequence.slot = len(scheduled)
        scheduled.append(Scheduled(sequence, start, length, samples=False, is_first=True))
    layout = PackLayout(num_tokens, num_rows, MAX_PAGES, PAGE_SIZE, num_slots=num_rows)
    return scheduled, layout.unpack(jnp.asarray(Packer(layout).pack((tuple(scheduled),), layout)))


CASES = {
    "decodes of many lengths": ([(0, 1), (7, 1), (8, 1), (130, 1), (300, 1)], 160, 80),
    "one prompt": ([(0, 100)], 160, 80),
    "second chunk of a long prompt": ([(250, 90)], 160, 80),
    "decodes and chunks": ([(5, 1), (64, 1), (0, 70), (16, 33), (3, 20)], 160, 80),
    "more rows than one query block": ([(i, 1) for i in range(70)], 160, 80),
    "no padding at all": ([(2, 1), (0, 7)], 8, 2),
    "bucket that is no multiple of the query block": ([(0, 100)], 100, 1),
}


run = jax.jit(paged_attention, static_argnames="scale")


@pytest.mark.parametrize(("case", "as_bits"), [*((case, False) for case in CASES), ("decodes and chunks", True)])
def test_equals_plain_attention(case, as_bits):
    lengths, num_tokens, num_rows = CASES[case]
    assert MAX_PAGES % pages_per_block(PAGE_SIZE) == 0
    rng = np.random.default_rng(1)
    scheduled, batch = build(lengths, num_tokens, num_rows, rng)
    q = rng.normal(0, 1, (num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
    k, v = (rng.normal(0, 1, (num_tokens, KV_HEADS, HEAD_DIM)).astype(np.float32) for _ in range(2))
    cache = rng.normal(0, 1, (NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM)).astype(np.float32)
    given = cache.view(np.uint32) if as_bits else cache
    out, new_cache = run(q, k, v, given, batch, scale=HEAD_DIM**-0.5)
    assert new_cache.dtype == given.dtype
    new_cache = np.asarray(new_cache).view(np.float32)
    at = 0
    untouched = np.ones((NUM_PAGES, PAGE_SIZE), bool)
    untouched[0] = False  # the padding page may hold anything
    for item in scheduled:
        stop, end = at + item.length, item.start + item.length
        old = cache[item.sequence.pages[0]].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[: item.start]
        keys, values = np.concatenate([old[:, ::2], k[at:stop]]), np.concatenate([old[:, 1::2], v[at:stop]])
        np.testing.assert_allclose(out[at:stop], plain(q[at:stop], keys, values, item.start), atol=2e-5)
        stored = new_cache[item.sequence.pages[0]].reshape(-1, 2 * KV_HEADS, HEAD_DIM)[:end]
        np.testing.assert_array_equal(stored[:, ::2], keys)
        np.testing.assert_array_equal(stored[:, 1::2], values)
        for position in range(item.start, end):
            untouched[item.sequence.pages[0][position // PAGE_SIZE], position % PAGE_SIZE] = False
        at = stop
    np.testing.assert_array_equal(new_cache[untouched], cache[untouched])
    np.testing.assert_array_equal(out[at:], np.zeros_like(out[at:]))


def test_garbage_beyond_a_sequence_is_never_read():
    """Unused table entries, unused offsets of the last page and the padding page hold NaN; no NaN comes out."""
    rng = np.random.default_rng(2)
    scheduled, batch = build([(5, 1), (0, 21)], 160, 80, rng)
    cache = np.full((NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), np.nan, np.float32)
    flat = cache.reshape(-1, 2 * KV_HEADS, HEAD_DIM)
    for item in scheduled:
        for position in range(item.start):
            flat[item.sequence.pages[0][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE] = 1.0
    q, k, v = (np.ones((160, heads, HEAD_DIM), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, _ = run(q, k, v, cache, batch, scale=HEAD_DIM**-0.5)
    np.testing.assert_allclose(out[:22], 1.0, atol=1e-6)


@pytest.mark.parametrize("others", [[], [(3, 1)]], ids=["a block of one sequence", "a block of several"])
def test_a_token_that_is_not_finite_reaches_only_later_tokens_of_its_sequence(others):
    """The pages before it may be shared with other requests."""
    rng = np.random.default_rng(5)
    _, batch = build([*others, (0, 40)], 64, 8, rng)
    bad = len(others) + 30
    q, k, v = (rng.normal(0, 1, (64, heads, HEAD_DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cache = np.zeros((NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), np.float32)
    good_out, _ = run(q, k, v, cache, batch, scale=HEAD_DIM**-0.5)
    for array in (q, k, v):
        array[bad] = np.nan
    out, _ = run(q, k, v, cache, batch, scale=HEAD_DIM**-0.5)
    np.testing.assert_allclose(out[:bad], good_out[:bad], atol=1e-6)
    assert np.isnan(out[bad : len(others) + 40]).all()


def test_bfloat16_cache_as_bits_equals_the_plain_one():
    rng = np.random.default_rng(4)
    _, batch = build([(9, 1), (0, 40)], 160, 80, rng)
    q, k, v = (
        jnp.asarray(rng.normal(0, 1, (160, heads, HEAD_DIM)), jnp.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = rng.normal(0, 1, (NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM)).astype(ml_dtypes.bfloat16)
    plain_out, plain_cache = run(q, k, v, jnp.asarray(cache), batch, scale=HEAD_DIM**-0.5)
    bits_out, bits_cache = run(q, k, v, jnp.asarray(cache.view(np.uint16)), batch, scale=HEAD_DIM**-0.5)
    np.testing.assert_array_equal(np.asarray(bits_cache), np.asarray(plain_cache).view(np.uint16))
    np.testing.assert_array_equal(np.asarray(bits_out), np.asarray(plain_out))


def test_sequences_may_share_a_page_that_this_step_fills():
    rng = np.random.default_rng(6)
    scheduled, batch = build([(0, 16), (8, 4)], 160, 80, rng)
    first, second = (item.sequence for item in scheduled)
    table = np.array(batch.page_table[0])
    table[1, 0] = first.pages[0][0]
    second.pages[0][0] = first.pages[0][0]
    batch = dataclasses.replace(batch, page_table=jnp.asarray(table)[None])
    q, k, v = (rng.normal(0, 1, (160, heads, HEAD_DIM)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, _ = run(
        q, k, v, np.zeros((NUM_PAGES, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), np.float32), batch, scale=HEAD_DIM**-0.5
    )
    keys, values = np.concatenate([k[:8], k[16:20]]), np.concatenate([v[:8], v[16:20]])
    np.testing.assert_allclose(out[16:20], plain(q[16:20], keys, values, 8), atol=2e-5)
