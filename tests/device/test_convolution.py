"""The causal convolution on ragged batches, against a loop over one sequence at a time."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tpu_serve.layers.convolution import convolve

CHANNELS = 6

run = jax.jit(convolve)


def plain(x, weight, tail):
    """One sequence x [L, C]: its outputs and its last inputs."""
    inputs = np.concatenate([tail, x]).astype(np.float64)
    taps = np.asarray(weight, np.float64)
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for tap in range(taps.shape[1]):
            out[t] += inputs[t + tap] * taps[:, tap]
    return out, np.concatenate([tail, x])[len(x) :]


def layout(lengths, num_tokens, num_rows):
    """seq_of_token and cu_q_lens of rows that have these lengths."""
    starts = np.cumsum([0, *lengths])
    cu = np.full(num_rows + 1, starts[-1], np.int32)
    cu[: len(starts)] = starts
    rows = np.full(num_tokens, -1, np.int32)
    rows[: starts[-1]] = np.repeat(np.arange(len(lengths)), lengths)
    return rows, cu


# (tokens, rows) of the steps; each costs a compilation.
SHORT, LONG = (8, 12), (64, 16)

CASES = {
    "one token": ([1], SHORT),
    "fewer tokens than taps": ([2, 3], SHORT),
    "no padding": ([8], SHORT),
    "two tokens at the end of the bucket": ([1, 5, 2], SHORT),
    "decodes": ([1] * 7, SHORT),
    "nothing at all": ([], SHORT),
    "decodes and chunks": ([1] * 5 + [2, 3, 4, 5, 40], LONG),
    "rows of any order, some empty": ([3, 1, 0, 20, 1, 0, 2], LONG),
    "decodes behind a chunk": ([12, 1, 1, 1, 1, 1, 1], LONG),
    "a bucket shorter than the taps": ([2], (2, 2)),
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(case, dtype):
    lengths, (num_tokens, num_rows) = CASES[case]
    check(lengths, num_tokens, num_rows, 4, dtype)


@pytest.mark.parametrize("num_taps", [1, 2, 5])
def test_number_of_taps(num_taps):
    check([1, 1, 2, 7, 3], 16, 8, num_taps, np.float32)


def check(lengths, num_tokens, num_rows, num_taps, dtype):
    rng = np.random.default_rng(1)
    rows, cu = layout(lengths, num_tokens, num_rows)
    x = rng.normal(0, 1, (num_tokens, CHANNELS)).astype(dtype)
    x[cu[-1] :] = np.nan
    weight = rng.normal(0, 1, (CHANNELS, num_taps)).astype(dtype)
    tails = rng.normal(0, 1, (num_rows, num_taps - 1, CHANNELS)).astype(dtype)
    out, new_tails = run(x, weight, tails, rows, cu)
    assert out.dtype == new_tails.dtype == dtype
    out, new_tails = np.asarray(out), np.asarray(new_tails)
    for row, (start, stop) in enumerate(itertools.pairwise(cu)):
        want, tail = plain(x[start:stop], weight, tails[row])
        # Sums in float32, rounded once: to the nearest bfloat16, give or take a tie.
        bound = 2**-8 * np.abs(want) + 1e-6 if dtype != np.float32 else 1e-6
        assert (np.abs(out[start:stop].astype(np.float64) - want) <= bound).all()
        assert new_tails[row].tobytes() == tail.tobytes()
    np.testing.assert_array_equal(out[cu[-1] :].astype(np.float32), 0)


@pytest.mark.parametrize("cuts", [[1, 11], [2, 10], [3, 9], [1, 1, 1, 9], [5, 7], [11, 1]])
def test_cuts_change_nothing(cuts):
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (12, CHANNELS)).astype(np.float32)
    weight = rng.normal(0, 1, (CHANNELS, 4)).astype(np.float32)
    want, _ = plain(x, weight, np.zeros((3, CHANNELS), np.float32))
    tails, parts, at = np.zeros((2, 3, CHANNELS), np.float32), [], 0
    for length in cuts:
        step = np.zeros((16, CHANNELS), np.float32)
        step[:length] = x[at : at + length]
        out, tails = run(step, weight, tails, *layout([length], 16, 2))
        parts.append(out[:length])
        at += length
    np.testing.assert_allclose(jnp.concatenate(parts), want, atol=1e-6)
    np.testing.assert_array_equal(tails[0], x[-3:])


@pytest.mark.parametrize("bad", range(4))
def test_numbers_that_are_none_stay_in_their_sequence(bad):
    rng = np.random.default_rng(3)
    rows, cu = layout([1, 1, 2, 3], 8, 12)
    x = rng.normal(0, 1, (8, CHANNELS)).astype(np.float32)
    weight = rng.normal(0, 1, (CHANNELS, 4)).astype(np.float32)
    tails = rng.normal(0, 1, (12, 3, CHANNELS)).astype(np.float32)
    want, want_tails = run(x, weight, tails, rows, cu)
    x[rows == bad] = np.nan
    tails[bad] = np.nan
    out, new_tails = run(x, weight, tails, rows, cu)
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), rows == bad)
    np.testing.assert_array_equal(out[rows != bad], want[rows != bad])
    others = np.arange(12) != bad
    np.testing.assert_array_equal(new_tails[others], want_tails[others])
