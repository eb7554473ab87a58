"""The attention kernel on a simulated device, both orders of copies, against the reference; the cache against tokens written one by one.

Compiling a simulated kernel takes far longer than running it, so each meets many steps.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import NUM_PAGES, Case, expected, simulated, written

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.ragged_paged_attention import config, kernel, op, tables
from tpu_serve.kernels.ragged_paged_attention.cases import problem
from tpu_serve.kernels.ragged_paged_attention.config import Config, heuristic, smem_bytes, tables_stay

PAIR = Case(4, 2, 8)
CASES = {
    "pairs of heads": PAIR,
    "one KV head, a window, sinks": Case(7, 1, 16, window=11, has_sinks=True, config=Config(32, 1, 2, 3, 2)),
    "key and value apart, a soft cap": Case(
        6, 2, 128, soft_cap=2.0, dtype="bfloat16", page_size=16, max_pages=6, config=Config(16, 1, 1, 2, 4)
    ),
    "int8": Case(4, 2, 8, page_size=32, max_pages=4, window=50, stored="int8", config=Config(16, 1, 1, 2, 2)),
    "float8_e4m3fn": Case(3, 1, 8, page_size=32, max_pages=4, stored="float8_e4m3fn", config=Config(64, 2, 1, 2, 3)),
}
STEPS = {
    # Ends before, at and behind the end of a page, in fewer blocks than a ring holds and in more.
    "decodes and chunks": [(0, 1), (7, 1), (8, 1), (63, 1), (0, 20), (13, 30), (31, 2)],
    "decodes": [(5, 1), (16, 1), (31, 1)],
    "one chunk of all tokens": [(27, 64)],
    "chunks that meet within a tile": [(0, 16), (40, 15), (3, 2), (24, 8), (15, 17)],
    "nothing": [],
}


def check(case, batch, arrays, allow_nan=False, simulation=None):
    """Values and cache; returns what came out of the last run."""
    q, k, v, cache = arrays
    right = written(case, k, v, cache, batch)
    wanted = expected(case, q, jax.tree.map(jnp.asarray, right), batch)
    tolerance = 2e-5 if case.dtype == "float32" else 2e-2
    for out, new in (simulation or simulated(case)).run(q, k, v, cache, batch, allow_nan=allow_nan):
        assert out.dtype == q.dtype
        assert out.shape == q.shape
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted, atol=tolerance, rtol=tolerance)
        assert not np.asarray(out, np.float32)[int(batch.num_tokens) :].any()
        for found, one in zip(jax.tree.leaves(new), jax.tree.leaves(right), strict=True):
            np.testing.assert_array_equal(np.asarray(found[1:], np.float32), np.asarray(one[1:], np.float32))
    return out


@pytest.mark.parametrize("name", CASES)
def test_values_and_cache(name):
    case = CASES[name]
    for seed, spans in enumerate(STEPS.values()):
        check(case, case.batch(spans), case.arrays(seed))


def test_sequences_may_share_pages_that_this_step_fills():
    """A row that comes first reads what one behind it writes."""
    case = CASES["pairs of heads"]
    check(case, case.batch([(16, 1), (24, 9), (0, 32)], share=(0, 1, 0)), case.arrays(1))
    spans = [(16, 1), (32, 5), (0, 33)]
    batch = case.batch(spans)
    table, index = np.array(batch.page_table[0]), np.array(batch.kv_index[0])
    table[0, :2] = table[2, :2]
    table[1, :4] = table[2, :4]
    batch = type(batch)(
        **{**vars_of(batch), "page_table": jnp.asarray(table)[None], "kv_index": jnp.asarray(index)[None]}
    )
    check(case, batch, case.arrays(2))


def vars_of(batch):
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


def test_rows_that_have_stopped_race_for_the_padding_page_only():
    """As in a launch of several decode steps: such rows see one token, and all write to page 0 at once, which only they read."""
    case = Case(2, 1, 8, num_rows=12, num_tokens=16, max_pages=4, config=Config(16, 1, 1, 2, 2, 2))
    batch, stopped = case.batch([(4 + 2 * row, 1) for row in range(12)]), np.array([1, 2, 4, 10])
    beside = stopped % case.page_size
    changed = {
        "kv_index": batch.kv_index.at[0, stopped].set(beside), "page_table": batch.page_table.at[0, stopped].set(0),
        "kv_lens": batch.kv_lens.at[stopped].set(1), "positions": batch.positions.at[stopped].set(0),
    }  # fmt: skip
    batch, (q, k, v, cache) = dataclasses.replace(batch, **changed), case.arrays(5)
    right = written(case, k, v, cache, batch)
    wanted, goes_on = expected(case, q, jnp.asarray(right), batch), np.setdiff1d(np.arange(12), stopped)
    for out, pages in simulated(case, detect_races=False).run(q, k, v, cache, batch):
        np.testing.assert_allclose(out[goes_on], wanted[goes_on], atol=2e-5)
        np.testing.assert_array_equal(pages[1:], right[1:])


@pytest.mark.parametrize("name", ["pairs of heads", "one KV head, a window, sinks", "key and value apart, a soft cap"])
def test_what_a_token_does_not_see_may_be_anything(name):
    """Everything that no token of this step sees holds NaN, and so does one token of a chunk, which only those behind it see."""
    case = CASES[name]
    spans = [(4, 1), (17, 1), (3, 20), (0, 9)]
    batch, (q, k, v, cache) = case.batch(spans), case.arrays(3)
    hidden = np.ones((NUM_PAGES, case.page_size), bool)
    for row, (before, _) in enumerate(spans):
        for position in range(before):
            hidden[batch.page_table[0, row, position // case.page_size], position % case.page_size] = False
    hidden[0] = True
    cache = jnp.where(hidden[:, None, :, None], jnp.nan, cache).astype(cache.dtype)
    bad, at = 12, 2 + 12  # of the third row
    for spoil in ("value", "key and value"):
        spoilt_v = v.at[at].set(jnp.nan)
        spoilt_k = k.at[at].set(jnp.nan) if spoil == "key and value" else k
        out = check(case, batch, (q, spoilt_k, spoilt_v, cache), allow_nan=True)
        last = 22 if case.window is None else min(22, at + case.window)
        nan = np.isnan(np.asarray(out, np.float32)).all(axis=(1, 2))
        np.testing.assert_array_equal(np.flatnonzero(nan), np.arange(at, last))
        assert bad


def test_page_tables_that_scalar_memory_does_not_hold(monkeypatch):
    """They come in pieces, here of 4 pages, so that sequences have several."""
    for module in (config, kernel, op, tables):
        monkeypatch.setattr(module, "TABLE_CHUNK", 4)
    monkeypatch.setattr(config, "MOST_TABLE_BYTES", 0)
    case = Case(2, 1, 8, config=Config(16, 2, 2, 2, 2), num_tokens=32)
    assert not tables_stay(case.problem)
    simulation = simulated.__wrapped__(case)  # not from the cache, where they stay
    check(case, case.batch([(63, 1), (2, 1), (20, 20)]), case.arrays(1), simulation=simulation)


def test_how_problems_are_cut():
    chip = TPU_CHIPS["v6e"]
    wide, narrow = problem("Qwen3-30B-A3B", 1, 64, 64), problem("GPT-OSS-120B local", 8, 64, 64)
    assert heuristic(wide, chip).decode_pieces < heuristic(narrow, chip).decode_pieces, "short sequences go together"
    assert heuristic(narrow, chip).decode_pages == 2, "a window's keys lie in two pages at most"
    long = problem("Qwen3-30B-A3B", 4, 64, 64, max_pages=2048)
    assert tables_stay(wide)
    assert not tables_stay(long)
    assert smem_bytes(long) < chip.smem_bytes
