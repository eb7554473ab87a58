"""Reported log-probabilities in every mode, of sampled tokens and of prompts, by definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_reference import VOCABULARY, Driver, kept_by_sorting, make_row

from tpu_serve.layers.logprobs import LOGPROBS_MODES, prompt_logprobs
from tpu_serve.request import Bias

PROMPT = (3, 5, 9)


def normalised(logits):
    wide = np.asarray(logits, np.float64)
    highest = wide.max(axis=-1, keepdims=True)
    return wide - highest - np.log(np.exp(wide - highest).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def driver():
    return Driver()


def some_logits(num_rows):
    return np.random.default_rng(1).normal(0, 3, (num_rows, VOCABULARY)).astype(np.float32)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("any_random", [False, True])
def test_modes(driver, mode, any_random):
    logits = some_logits(3)
    edits = {"biases": (Bias(4, 6.0),), "allowed": set(range(30)), "presence_penalty": 1.5, "generated": (7, 8)}
    rows = [
        make_row(0, PROMPT, temperature=0.0, logprobs=20, **edits),
        make_row(1, PROMPT, temperature=0.5 if any_random else 0.0, top_k=9, logprobs=2, **edits),
        make_row(2, PROMPT, temperature=0.0),
    ]
    edited, sampled = driver.step(logits, rows, mode=mode)
    expected = np.array(logits, np.float64)
    if mode.startswith("processed"):
        expected = edited.astype(np.float64)
        if any_random:
            expected[1] = np.where(kept_by_sorting(edited[1], 0.5, 0, 9, 1), expected[1] / 0.5, -np.inf)
    if mode.endswith("logprobs"):
        expected = normalised(expected)
    own = expected[np.arange(3), sampled.token_ids]
    np.testing.assert_allclose(sampled.logprobs.own, own, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sampled.logprobs.top, -np.sort(-expected, axis=1)[:, :20], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(expected, sampled.logprobs.top_ids, axis=1), sampled.logprobs.top, rtol=1e-5, atol=1e-5
    )


def test_nothing_is_reported_where_nobody_asks(driver):
    _, sampled = driver.step(some_logits(1), [make_row(0, PROMPT)])
    assert not any(np.any(part) for part in jax.tree.leaves(sampled.logprobs))


@pytest.mark.parametrize("num_tokens", [7, 128, 300])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_prompts(num_tokens, mode):
    """One piece, a whole one, and several with one that is not full."""
    rng = np.random.default_rng(num_tokens)
    hidden, table = rng.normal(size=(num_tokens, 6)).astype(np.float32), rng.normal(size=(50, 6)).astype(np.float32)
    targets = rng.integers(0, 50, num_tokens).astype(np.int32)
    targets[::5] = -1

    @jax.jit
    def run(hidden, targets, any_wanted):
        return prompt_logprobs(lambda piece: jnp.dot(piece, table.T), hidden, targets, any_wanted, mode)

    found = jax.tree.map(np.asarray, run(hidden, targets, 1))
    expected = hidden.astype(np.float64) @ table.T.astype(np.float64)
    expected = normalised(expected) if mode == "raw_logprobs" else expected
    wanted = targets >= 0
    np.testing.assert_allclose(
        found.own[wanted], expected[np.arange(num_tokens), targets][wanted], rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(found.top, -np.sort(-expected, axis=1)[:, :20], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(expected, found.top_ids, axis=1), found.top, rtol=1e-4, atol=1e-4)
    assert not any(np.any(part) for part in jax.tree.leaves(run(hidden, targets, 0)))
