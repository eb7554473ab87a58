"""Keys and values stored in 8 bits: what comes back is what was written, as near as the type allows, and attention is that of what came back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_attention import HEAD_DIM, HEADS, KV_HEADS, NUM_PAGES, PAGE_SIZE, build, plain

from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.quantised import QuantisedArray
from tpu_serve.layers.attention import paged_attention

run = jax.jit(paged_attention, static_argnames=("scale", "window", "table"))
# Largest error of a value in units of its row's largest: half a step of int8, and half of the 3-bit mantissa's last bit.
WORST = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}


def empty(stored, as_bits):
    layout = CacheLayout.uniform(1, KV_HEADS, HEAD_DIM, jnp.float32).stored_as(stored)
    if as_bits:
        layout = type(layout)(layout.layers, layout.dtype, True, stored)
    (cache,) = layout.allocate((NUM_PAGES,), PAGE_SIZE, 1, make_mesh(jax.devices()[:1]), DEFAULT_RULES)
    assert isinstance(cache, QuantisedArray)
    return cache


def restored(cache, stored, pages):
    """f32[tokens, 2 K, D] of a sequence, by NumPy alone."""
    values = np.asarray(cache.values)[pages]
    if values.dtype == np.uint8:
        values = values.view(ml_dtypes.float8_e4m3fn)
    wide = values.astype(np.float32) * np.asarray(cache.scale)[pages][..., None]
    return wide.reshape(-1, 2 * KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize(("stored", "as_bits"), [("int8", True), ("float8_e4m3fn", True), ("float8_e4m3fn", False)])
def test_attention_over_what_was_stored(stored, as_bits):
    rng = np.random.default_rng(1)
    scheduled, batch = build([(0, 40), (0, 9)], 64, 8, rng)
    # Rows of very different sizes, each with a scale of its own.
    sizes = np.exp(rng.normal(0, 3, (64, 1, 1)))
    k, v = ((rng.normal(0, 1, (64, KV_HEADS, HEAD_DIM)) * sizes).astype(np.float32) for _ in range(2))
    k /= np.abs(k).max() / 4
    q = rng.normal(0, 1, (64, HEADS, HEAD_DIM)).astype(np.float32)
    out, cache = run(q, k, v, empty(stored, as_bits), batch, scale=HEAD_DIM**-0.5)
    at = 0
    for item in scheduled:
        stop = at + item.length
        kv = restored(cache, stored, item.sequence.pages[0])[: item.length]
        for given, kept in ((k[at:stop], kv[:, ::2]), (v[at:stop], kv[:, 1::2])):
            largest = np.abs(given).max(axis=-1, keepdims=True)
            assert (np.abs(kept - given) <= 1.001 * WORST[stored] * largest).all()
            assert (np.abs(kept).max(axis=-1) > 0.99 * largest[..., 0]).all(), "the largest of a row is kept"
        expected = plain(q[at:stop], kv[:, ::2], kv[:, 1::2], 0)
        np.testing.assert_allclose(out[at:stop], expected, atol=2e-5 * np.abs(v).max())
        at = stop
    # A later step reads what an earlier one wrote.
    later, batch = build([(12, 1)], 8, 4, np.random.default_rng(2))
    later[0].sequence.pages[0] = scheduled[0].sequence.pages[0][:2]
    table = np.zeros_like(batch.page_table)
    table[0, 0, :2] = later[0].sequence.pages[0]
    index = np.array(batch.kv_index)
    index[0, 0] = table[0, 0, 1] * PAGE_SIZE + 4
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__} | {
        "page_table": table,
        "kv_index": index,
    }
    out, cache = run(q[:8], k[:8], v[:8], cache, type(batch)(**fields), scale=HEAD_DIM**-0.5)
    kv = restored(cache, stored, later[0].sequence.pages[0])[:13]
    np.testing.assert_allclose(out[:1], plain(q[:1], kv[:, ::2], kv[:, 1::2], 12), atol=2e-5 * np.abs(v).max())


def test_zeros_and_bad_values():
    _, batch = build([(0, 4)], 8, 4, np.random.default_rng(3))
    q = np.ones((8, HEADS, HEAD_DIM), np.float32)
    k, v = (np.zeros((8, KV_HEADS, HEAD_DIM), np.float32) for _ in range(2))
    out, _ = run(q, k, v, empty("int8", True), batch, scale=1.0)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    v[2, 0, 1] = np.nan
    out, _ = run(q, k, v, empty("int8", True), batch, scale=1.0)
    np.testing.assert_array_equal(out[:2], np.zeros_like(out[:2]))
    assert np.isnan(np.asarray(out)[2:4, :2]).any(axis=(1, 2)).all(), "a bad value shows in the tokens that see it"


def test_bytes_of_a_page_count_the_scales():
    layout = CacheLayout.uniform(3, KV_HEADS, 16, jnp.bfloat16)
    assert layout.page_bytes(8) == 3 * 8 * 2 * KV_HEADS * 32
    narrow = layout.stored_as("int8")
    assert narrow.page_bytes(8) == 3 * 8 * 2 * KV_HEADS * (16 + 4)
    arrays = narrow.allocate((5,), 8, 1, make_mesh(jax.devices()[:1]), DEFAULT_RULES)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) == 5 * narrow.page_bytes(8)
