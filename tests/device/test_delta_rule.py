"""The gated delta rule on ragged batches, against a loop over tokens in float64."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tpu_serve.layers.delta_rule import ROW_BLOCK, delta_rule

KEY_DIM, VALUE_DIM = 16, 24

run = jax.jit(delta_rule)


def loop(q, k, v, log_decay, beta, state):
    """Answers and last state of one sequence [L, …] that starts from `state`."""
    q, k, v, log_decay, beta = (np.asarray(a, np.float64) for a in (q, k, v, log_decay, beta))
    state, out = np.array(state, np.float64), np.zeros(v.shape)
    group = v.shape[1] // k.shape[1]
    for t in range(len(v)):
        for head in range(v.shape[1]):
            key, query = k[t, head // group], q[t, head // group]
            key = key / np.sqrt(key @ key + 1e-6)
            query = query / np.sqrt(query @ query + 1e-6) / np.sqrt(len(query))
            faded = np.exp(log_decay[t, head]) * state[head]
            state[head] = faded + np.outer(key, beta[t, head] * (v[t, head] - key @ faded))
            out[t, head] = query @ state[head]
    return out, state


def layout(lengths, num_tokens, num_rows):
    """seq_of_token and cu_q_lens of rows that have these lengths."""
    starts = np.cumsum([0, *lengths])
    cu = np.full(num_rows + 1, starts[-1], np.int32)
    cu[: len(starts)] = starts
    rows = np.full(num_tokens, -1, np.int32)
    rows[: starts[-1]] = np.repeat(np.arange(len(lengths)), lengths)
    return rows, cu


def make_tokens(rng, num_tokens, key_heads, value_heads):
    """Inputs of a model's kind: keys of which some resemble others, gates over their whole range."""
    k = rng.normal(0, 1, (num_tokens, key_heads, KEY_DIM)) + rng.normal(0, 1, (key_heads, KEY_DIM))
    return [
        a.astype(np.float32)
        for a in (
            rng.normal(0, 2, (num_tokens, key_heads, KEY_DIM)),
            k,
            rng.normal(0, 1, (num_tokens, value_heads, VALUE_DIM)),
            -np.exp(rng.normal(-3, 2, (num_tokens, value_heads))),
            rng.uniform(0, 1, (num_tokens, value_heads)),
        )
    ]


def make_states(rng, num_rows, value_heads):
    return rng.normal(0, 1, (num_rows, value_heads, KEY_DIM, VALUE_DIM)).astype(np.float32)


def assert_close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max(initial=0) <= tolerance * np.abs(want).max(initial=1e-3)


def check(lengths, tokens, states, num_tokens, tolerance=2e-6):
    """Runs the rows as one step, garbage in the padding, and compares every row with the loop."""
    rows, cu = layout(lengths, num_tokens, len(states))
    given = [np.full((num_tokens, *a.shape[1:]), np.nan, a.dtype) for a in tokens]
    for whole, part in zip(given, tokens, strict=True):
        whole[: len(part)] = part
    out, new_states = run(*given, states, rows, cu)
    assert out.dtype == tokens[2].dtype
    assert new_states.dtype == jnp.float32
    out, new_states = np.asarray(out), np.asarray(new_states)
    for row, (start, stop) in enumerate(itertools.pairwise(cu)):
        if start == stop:
            assert new_states[row].tobytes() == states[row].tobytes()
            continue
        want, state = loop(*(a[start:stop] for a in tokens), states[row])
        assert_close(out[start:stop], want, tolerance if out.dtype == np.float32 else 2**-8)
        assert_close(new_states[row], state, tolerance)
    np.testing.assert_array_equal(out[cu[-1] :].astype(np.float32), 0)


# (tokens, rows) of the steps; each costs a compilation.
SHORT, FULL, LONG = (10, 12), (70, ROW_BLOCK + 4), (192, 16)

CASES = {
    "one token": ([1], SHORT),
    "two": ([2], SHORT),
    "three beside a decode": ([1, 3], SHORT),
    "a bucket without padding": ([10], SHORT),
    "nothing at all": ([], SHORT),
    "decodes": ([1] * ROW_BLOCK, FULL),
    "decodes, the last block of rows moved": ([1] * (ROW_BLOCK + 3), FULL),
    "a chunk at the end of its bucket": ([1] * 6 + [64], FULL),
    "the rest of a chunk at the end of its bucket": ([1, 2, 67], FULL),
    "one token short of a chunk": ([63], LONG),
    "a chunk": ([64], LONG),
    "one token more": ([65], LONG),
    "chunks and a rest": ([130], LONG),
    "decodes and chunks": ([1] * 5 + [2, 3, 65, 64], LONG),
    "rows of any order, some empty": ([3, 1, 0, 70, 1, 0, 2], LONG),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(case):
    lengths, (num_tokens, num_rows) = CASES[case]
    rng = np.random.default_rng(1)
    check(lengths, make_tokens(rng, sum(lengths), 2, 4), make_states(rng, num_rows, 4), num_tokens)


@pytest.mark.parametrize(("key_heads", "value_heads"), [(3, 3), (1, 4)])
def test_value_heads_share_key_heads(key_heads, value_heads):
    rng = np.random.default_rng(2)
    check([1, 1, 20], make_tokens(rng, 22, key_heads, value_heads), make_states(rng, 4, value_heads), 24)


def strong_decay(tokens):
    tokens[3][:] = -20


def one_strong_decay(tokens):
    """One token forgets all, and the small decays behind it still count in full."""
    tokens[3][:] = -0.01
    tokens[3][5::20] = -5000


def endless_decay(tokens):
    tokens[3][::7] = -np.inf


def no_gates(tokens):
    tokens[3][:] = 0
    tokens[4][:] = 1


def almost_no_update(tokens):
    tokens[4][:] = 1e-6


def equal_keys(tokens):
    """The system is as far from the identity as it gets."""
    tokens[1][:] = tokens[1][:1]
    no_gates(tokens)


def zero_keys_and_queries(tokens):
    tokens[0][::3] = 0
    tokens[1][1::3] = 0


def tiny_keys(tokens):
    """Of about the size of the epsilon in their norm."""
    tokens[1][:] *= 1e-3


@pytest.mark.parametrize(
    "spoil",
    [
        strong_decay,
        one_strong_decay,
        endless_decay,
        no_gates,
        almost_no_update,
        equal_keys,
        zero_keys_and_queries,
        tiny_keys,
    ],
)
def test_extreme_inputs(spoil):
    rng = np.random.default_rng(3)
    tokens = make_tokens(rng, 135, 2, 4)
    spoil(tokens)
    num_tokens, num_rows = LONG
    check([1, 1, 3, 130], tokens, make_states(rng, num_rows, 4), num_tokens, tolerance=5e-6)


@pytest.mark.parametrize("cuts", [[1, 63], [7, 57], [64, 1], [1, 1, 1, 127], [100, 30], [65, 64, 1], [130]])
def test_cuts_change_nothing(cuts):
    rng = np.random.default_rng(4)
    num_tokens, num_rows = LONG
    tokens, first = make_tokens(rng, sum(cuts), 2, 4), make_states(rng, num_rows, 4)
    want, want_state = loop(*tokens, first[0])
    states, at = first, 0
    for length in cuts:
        rows, cu = layout([length], num_tokens, num_rows)
        part = [np.zeros((num_tokens, *a.shape[1:]), np.float32) for a in tokens]
        for whole, a in zip(part, tokens, strict=True):
            whole[:length] = a[at : at + length]
        out, states = run(*part, states, rows, cu)
        assert_close(out[:length], want[at : at + length], 2e-6)
        at += length
    assert_close(states[0], want_state, 2e-6)


def test_bfloat16():
    rng = np.random.default_rng(5)
    tokens = make_tokens(rng, 75, 2, 4)
    tokens = [a.astype(ml_dtypes.bfloat16) for a in tokens[:3]] + tokens[3:]
    check([1, 1, 3, 70], tokens, make_states(rng, 4, 4), 80)


@pytest.mark.parametrize("bad", [1, 3, 4])
def test_numbers_that_are_none_stay_in_their_sequence(bad):
    rng = np.random.default_rng(6)
    lengths, (num_tokens, num_rows) = [1, 1, 1, 66, 70], LONG
    tokens, states = make_tokens(rng, num_tokens, 2, 4), make_states(rng, num_rows, 4)
    rows, cu = layout(lengths, num_tokens, num_rows)
    want, want_states = run(*tokens, states, rows, cu)
    for part in tokens[:3]:
        part[rows == bad] = np.nan
    states[bad] = np.nan
    out, new_states = run(*tokens, states, rows, cu)
    assert np.isnan(out[cu[bad]]).all()
    np.testing.assert_array_equal(out[rows != bad], want[rows != bad])
    others = np.arange(num_rows) != bad
    np.testing.assert_array_equal(new_states[others], want_states[others])
