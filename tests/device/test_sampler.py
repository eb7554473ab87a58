"""The sampler against a numpy oracle that sorts, where the sampler counts."""

import functools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import ROWS, VOCABULARY, kept_by_sorting

from tpu_serve.device.batch import SamplingRows
from tpu_serve.layers.logit_edits import restrict
from tpu_serve.layers.sampler import _filter, sample


def rows(**values):
    """Sampling parameters of ROWS rows; scalars are repeated."""
    base = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": 0,
        "seed_low": 1,
        "seed_high": 2,
        "choice": 0,
        "output_position": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "is_biased": 0,
        "forced_id": -1,
    }
    floats = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    arrays = {
        name: np.broadcast_to(np.asarray(value, np.float32 if name in floats else np.int32), ROWS)
        for name, value in (base | values).items()
        if not name.startswith("any_")
    }
    flags = {name: np.int32(values.get(name, 1)) for name in SamplingRows.__dataclass_fields__ if name[:4] == "any_"}
    return SamplingRows(**arrays, **flags)


@functools.partial(jax.jit, static_argnums=(2, 3))
def run(logits, rows, num_valid, suppressed=()):
    return sample(logits, restrict(logits, num_valid, suppressed), rows)


run_filter = jax.jit(_filter)


@functools.cache
def some_logits(seed=0):
    return np.random.default_rng(seed).normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 2.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 36, 37, 500]),
    top_p=st.sampled_from([0.001, 0.3, 0.77, 0.95, 1.0]),
)
def test_filters_keep_what_sorting_keeps(seed, temperature, min_p, top_k, top_p):
    logits = some_logits(seed)
    parameters = rows(min_p=min_p, top_k=top_k, top_p=top_p)
    kept = np.isfinite(run_filter(logits / np.float32(temperature), parameters))
    for row in range(ROWS):
        np.testing.assert_array_equal(kept[row], kept_by_sorting(logits[row], temperature, min_p, top_k, top_p))


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    logits = np.tile(np.array([5.0, 3, 3, 1, *[-9] * 33], np.float32), (ROWS, 1))
    assert np.isfinite(run_filter(logits, rows(top_k=2)))[0].tolist() == [True] * 3 + [False] * 34


def test_a_top_p_that_float32_cannot_hold_keeps_the_most_probable_token():
    logits = some_logits()
    sampled = run(logits, rows(top_p=[1e-50, 1e-44, 1e-39, 1e-37, 1e-9]), VOCABULARY)
    np.testing.assert_array_equal(sampled.token_ids, logits.argmax(axis=1))


def test_each_row_has_its_own_parameters():
    logits = some_logits()
    kept = np.isfinite(run_filter(logits, rows(top_k=[1, 2, 3, 0, 5], top_p=[1, 1, 1, 0.5, 1])))
    assert kept.sum(axis=1)[[0, 1, 2, 4]].tolist() == [1, 2, 3, 5]
    np.testing.assert_array_equal(kept[3], kept_by_sorting(logits[3], 1, 0, 0, 0.5))


def test_greedy_rows_take_the_largest_logit_beside_random_ones():
    logits = some_logits()
    sampled = run(logits, rows(temperature=[0, 1, 0, 1, 0], top_k=[0, 1, 0, 1, 0]), VOCABULARY)
    assert sampled.token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert (
        run(logits, rows(temperature=0, any_random=0), VOCABULARY).token_ids.tolist() == logits.argmax(axis=1).tolist()
    )


def test_ids_outside_the_tokenizer_are_never_sampled():
    logits = some_logits().copy()
    logits[:, 30:] = 50.0
    for temperature in (0.0, 2.0):
        assert max(run(logits, rows(temperature=temperature), 30).token_ids.tolist()) < 30


def test_suppressed_ids_are_never_sampled():
    logits = some_logits().copy()
    logits[:, [3, 17]] = 50.0
    suppressed = (3, 17, 10**6)  # the last one is no id of this model
    for temperature in (0.0, 2.0):
        assert not {3, 17} & set(run(logits, rows(temperature=temperature), 30, suppressed).token_ids.tolist())
    assert {3, 17} & set(run(logits, rows(temperature=0.0), 30).token_ids.tolist())


def test_a_row_that_is_not_a_number_is_reported_and_changes_no_other():
    logits = some_logits().copy()
    expected = run(logits, rows(temperature=[0, 1, 0, 1, 0]), VOCABULARY).token_ids.tolist()
    logits[1, 7] = np.nan
    logits[2, :] = np.nan
    assert run(logits, rows(temperature=[0, 1, 0, 1, 0]), VOCABULARY).token_ids.tolist() == [
        expected[0],
        -1,
        -1,
        *expected[3:],
    ]


def test_frequencies_follow_the_distribution():
    logits = np.tile(np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32)), (ROWS, 1))
    counts = np.zeros(4)
    draws = 400
    for position in range(draws):
        tokens = run(logits, rows(output_position=position, seed_low=np.arange(ROWS)), 4).token_ids
        counts += np.bincount(tokens, minlength=4)
    expected = np.array([0.5, 0.25, 0.125, 0.125]) * draws * ROWS
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 16.3, counts  # 99.9 % quantile for 3 degrees of freedom


def test_noise_depends_on_seed_choice_and_position_only():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)

    def draw(**values):
        return np.stack([run(logits, rows(output_position=step, **values), VOCABULARY).token_ids for step in range(8)])

    base = draw()
    assert (base == base[:, :1]).all(), "the row number must not matter"
    np.testing.assert_array_equal(draw(temperature=0.9, seed_low=[1, 9, 9, 9, 9])[:, 0], draw(temperature=0.9)[:, 0])
    for other in ({"seed_low": 3}, {"seed_high": 3}, {"choice": 1}):
        assert (draw(**other) != base).any(), other
    assert len(set(base[:, 0].tolist())) > 1, "the position must matter"
