"""Biases, masks, penalties and scripts against their definitions, on the way that rows of a step go."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import (
    SLOTS,
    VOCABULARY,
    Driver,
    after,
    edited_by_definition,
    kept_by_sorting,
    make_row,
)

from tpu_serve.device.sampler_state import MOST_COUNTED, num_bytes
from tpu_serve.request import MAX_BIASES, NOT_A_NUMBER_ID, NOTHING_ALLOWED_ID, Bias

PROMPT = (3, 5, 5, 9)


@pytest.fixture(scope="module")
def driver():
    return Driver()


def logits_of(num_rows, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (num_rows, VOCABULARY)).astype(np.float32)


def check(edited, logits, rows, num_valid=VOCABULARY):
    for mine, raw, row in zip(edited, logits, rows, strict=True):
        np.testing.assert_allclose(
            mine, edited_by_definition(raw, row, row.sequence.constraint, num_valid), rtol=1e-5, atol=1e-5
        )


tokens = st.integers(0, VOCABULARY - 1)
options = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, -0.3, 0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, -0.3, 0.7, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "biases": st.dictionaries(
            tokens, st.tuples(st.sampled_from([-np.inf, -100.0, 0.5, 100.0]), st.integers(0, 8))
        ).map(lambda found: tuple(Bias(token_id, *what) for token_id, what in found.items())),
        "allowed": st.sets(tokens, min_size=1),
        "generated": st.lists(tokens, max_size=6),
        "prompt": st.lists(tokens, min_size=1, max_size=6),
        "temperature": st.sampled_from([0.0, 0.5, 2.0]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
    },
)


@settings(max_examples=60, deadline=None)
@given(wanted=st.lists(options, min_size=1, max_size=5), seed=st.integers(0, 100), slots=st.permutations(range(SLOTS)))
def test_any_options_of_any_rows_for_three_steps(driver, wanted, seed, slots):
    rows = [
        make_row(slot, seed=7, **({"prompt": PROMPT, "temperature": 0.0} | given))
        for slot, given in zip(slots, wanted, strict=False)
    ]
    for step in range(3):
        logits = logits_of(len(rows), seed + step)
        edited, sampled = driver.step(logits, rows, num_valid=VOCABULARY - 2)
        check(edited, logits, rows, VOCABULARY - 2)
        for token_id, mine, row in zip(sampled.token_ids, edited, rows, strict=True):
            params = row.sequence.request.params
            if np.isneginf(mine).all():
                assert token_id == NOTHING_ALLOWED_ID
            elif params.is_greedy:
                assert token_id == mine.argmax()
            else:
                kept = kept_by_sorting(mine, params.temperature, params.min_p, params.top_k, params.top_p)
                assert kept[token_id]
        rows = [
            after(row, int(token_id)) for row, token_id in zip(rows, sampled.token_ids, strict=True) if token_id >= 0
        ]
        if not rows:
            return


def test_penalties_by_hand(driver):
    logits = np.full((3, VOCABULARY), 1.0, np.float32)
    logits[:, 5] = -1.0
    rows = [
        make_row(0, PROMPT, (7, 7), repetition_penalty=2.0),
        make_row(1, PROMPT, (7, 7), frequency_penalty=0.5),
        make_row(2, PROMPT, (7, 7), presence_penalty=0.5),
    ]
    edited, _ = driver.step(logits, rows)
    assert edited[:, [0, 3, 5, 7]].tolist() == [[1, 0.5, -2, 0.5], [1, 1, -1, 0], [1, 1, -1, 0.5]]


def test_a_bias_ends_at_its_position(driver):
    row = make_row(0, PROMPT, biases=(Bias(4, -np.inf, until=2), Bias(6, 9.0, until=1), Bias(8, 1.5)), temperature=0.0)
    logits, seen = np.zeros((1, VOCABULARY), np.float32), []
    for _ in range(4):
        edited, _ = driver.step(logits, [row])
        seen.append(edited[0, [4, 6, 8]].tolist())
        row = after(row, 1)
    assert seen == [[-np.inf, 9, 1.5], [-np.inf, 0, 1.5], [0, 0, 1.5], [0, 0, 1.5]]


def test_a_full_table_of_biases():
    """As many as there can be have room; all but the last one are of ids that this small vocabulary does not have."""
    biases = (*(Bias(VOCABULARY + index, 5.0) for index in range(MAX_BIASES - 1)), Bias(2, 5.0))
    edited, _ = Driver().step(np.zeros((1, VOCABULARY), np.float32), [make_row(0, PROMPT, biases=biases)])
    assert edited[0].tolist() == [0, 0, 5.0] + [0] * (VOCABULARY - 3)


def test_a_row_that_asks_for_nothing_is_unchanged_beside_rows_that_ask_for_everything(driver):
    logits = logits_of(4)
    everything = {"repetition_penalty": 3.0, "presence_penalty": 1.0, "frequency_penalty": 1.0, "allowed": {1, 2}}
    rows = [make_row(slot, PROMPT, (1, 2), biases=(Bias(9, 3.0),), **everything) for slot in (4, 1)]
    driver.step(logits[:2], rows)  # leaves counts and biases behind in the slots of the plain rows
    plain = [make_row(slot, PROMPT, (1, 2)) for slot in (4, 1)]
    others = [make_row(slot, PROMPT, (1, 2), biases=(Bias(9, 3.0),), **everything) for slot in (7, 8)]
    edited, sampled = driver.step(logits, [plain[0], others[0], plain[1], others[1]])
    np.testing.assert_array_equal(edited[[0, 2]], logits[[0, 2]])
    _, alone = driver.step(logits[[0, 2]], plain)
    assert sampled.token_ids[[0, 2]].tolist() == alone.token_ids.tolist()


def test_bytes_are_those_of_the_arrays(driver):
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(driver.state))
    assert num_bytes(SLOTS, VOCABULARY) == held


def test_only_rows_with_penalties_are_counted(driver):
    counting, plain = make_row(3, PROMPT, presence_penalty=1.0), make_row(4, PROMPT)
    driver.step(logits_of(2), [counting, make_row(4, (1,), presence_penalty=1.0)])
    before = np.asarray(driver.state.counts)
    _, sampled = driver.step(logits_of(2), [after(counting, 0), plain])
    changed = np.argwhere(np.asarray(driver.state.counts) != before)
    assert changed.tolist() == [[3, sampled.token_ids[0]]]


def test_counts_do_not_run_over(driver):
    many = make_row(0, (2,), [2, 6] * (MOST_COUNTED + 3), frequency_penalty=0.001)
    driver.state = driver.writer.write(driver.state, ((many,),))
    row = dataclasses.replace(make_row(0, (2,), frequency_penalty=0.001, forced=(6, 2)), is_first=False)
    driver.packer.slots[0].enter(row.sequence)
    for token_id in (6, 2, 0):
        edited, _ = driver.step(np.zeros((1, VOCABULARY), np.float32), [row])
        np.testing.assert_allclose(edited[0, [2, 6, 7]], [-0.001 * MOST_COUNTED] * 2 + [0], rtol=1e-6)
        row = after(row, token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_fails_alone(driver, temperature):
    logits = logits_of(4)
    logits[2, 4] = np.nan
    rows = [
        make_row(0, PROMPT, biases=(Bias(3, -np.inf),), allowed={3}, temperature=temperature, top_p=0.9),
        make_row(1, PROMPT, allowed={3}, temperature=temperature),
        make_row(2, PROMPT, allowed={3}, temperature=temperature),
        make_row(3, PROMPT, allowed=set(), temperature=temperature, logprobs=1),
    ]
    _, sampled = driver.step(logits, rows)
    assert sampled.token_ids.tolist() == [NOTHING_ALLOWED_ID, 3, NOT_A_NUMBER_ID, NOTHING_ALLOWED_ID]


def test_extreme_penalties_stay_numbers(driver):
    logits = logits_of(2)
    extreme = {"presence_penalty": 2.0, "frequency_penalty": -2.0, "temperature": 1e-5, "top_p": 0.5, "min_p": 0.5}
    rows = [
        make_row(slot, PROMPT, (1,), repetition_penalty=penalty, biases=(Bias(5, -np.inf),), **extreme)
        for slot, penalty in enumerate((1e-300, 1e300))
    ]
    edited, sampled = driver.step(logits, rows)
    assert not np.isnan(edited).any()
    assert np.isneginf(edited[:, 5]).all()
    assert (sampled.token_ids >= 0).all()


def test_a_script_is_followed_to_its_end_and_counted(driver):
    row = make_row(
        2, PROMPT, forced=(8, 8, 11), eos=(30, 20), presence_penalty=1.0, temperature=0.0, logprobs=1, allowed={0}
    )
    said = []
    for _ in range(5):
        logits = np.zeros((1, VOCABULARY), np.float32)
        edited, sampled = driver.step(logits, [row])
        check(edited, logits, [row])
        np.testing.assert_allclose(sampled.logprobs.own, -np.log(VOCABULARY), rtol=1e-5)
        said.append(int(sampled.token_ids[0]))
        row = after(row, said[-1])
    assert said == [8, 8, 11, 20, 20]
    free = make_row(2, PROMPT, (8,), forced=(8,), temperature=0.0)
    logits = logits_of(1)
    assert driver.step(logits, [free])[1].token_ids[0] == logits.argmax(), "without an end nothing is forced behind it"
