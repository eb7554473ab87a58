"""Permute forward and the gradient of combine's rows on a simulated device, against loops: every value, granules that blocks share, the rest.

Compiling a simulated kernel takes far longer than running it, so each is run on several inputs.
"""

import jax.numpy as jnp
import moe_combine_reference as reference
import numpy as np
import pytest
from moe_combine_inputs import Case, given, simulated

CASES = {
    # Three blocks, and granules of up to eight experts that all of them write to.
    "small experts": Case(300, 1, 60, 128, 128, weight_dtype=None),
    "weights, two panels": Case(300, 2, 13, 256, 128, weight_dtype="bfloat16", align=8),
    "last of three panels narrower": Case(150, 2, 13, 640, 256, weight_dtype="bfloat16"),
    "float32": Case(130, 2, 6, 128, 128, weight_dtype=None, dtype="float32", align=8),
    "int8": Case(200, 2, 13, 128, 128, weight_dtype=None, dtype="int8", align=32),
    "float8_e4m3fn": Case(200, 2, 13, 256, 128, weight_dtype=None, dtype="float8_e4m3fn", align=32),
}
ZERO_REST = {"weights, two panels", "last of three panels narrower", "int8"}


def same(found, wanted):
    """Value for value; a product leaves neither the sign of a zero nor the payload of a NaN."""
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), wanted.astype(np.float32))


def check(case, tokens, ids, weights, zero_rest):
    wanted, count = reference.permute(tokens, ids, weights, case.problem.num_rows), np.sum(ids >= 0)
    for rows in simulated(case, "scattered", zero_rest=zero_rest).run(*given(tokens, ids, weights), allow_nan=True):
        assert rows.dtype == jnp.dtype(case.dtype)
        same(rows[:count], wanted[:count])
        if zero_rest:
            assert not np.asarray(rows[count:]).astype(np.float32).any()


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_its_tokens(name):
    case = CASES[name]
    for seed, routing in enumerate(("partial", "uniform", "skewed", "by block", "few", "none")):
        check(case, case.tokens(seed), case.ids(seed, routing), case.weights(seed), name in ZERO_REST)


def test_the_rest_is_zero_behind_a_granule_that_only_the_last_block_has():
    """That block's buffer holds rows of the one before, which then lie behind the last row: nothing was read back over them."""
    case = CASES["weights, two panels"]
    ids = np.minimum(case.ids(routing="uniform"), 11)
    ids[256:] = 12
    ids[-2:] = -1, 12
    assert np.sum(ids >= 0) % case.align == 6
    check(case, case.tokens(), ids, case.weights(), True)


@pytest.mark.parametrize("name", ["weights, two panels", "last of three panels narrower", "float32", "float8_e4m3fn"])
def test_what_is_not_finite_stays_in_its_rows(name):
    """With its sign, which a weight may turn; a weight of 0 makes 0 of it."""
    case = CASES[name]
    ids, tokens, weights = case.ids(), case.tokens(), case.weights()
    tokens[3] = np.nan
    if "float8" not in name:  # float8_e4m3fn has no infinity
        tokens[70, ::3] = np.inf
        tokens[-1, -2:] = -np.inf, np.inf
    if weights is not None:
        weights[3, 0] = 0.0
        weights[70], weights[-1] = (1.5, -2.0), (-0.5, 3.0)
        assert (ids[[3, 70, -1]] >= 0).any(axis=1).all()
    check(case, tokens, ids, weights, name in ZERO_REST)


def test_float32_weights_of_bfloat16_tokens():
    """16 bits of a weight enter the product: less than a step off, and few values are not the nearest at all."""
    case = Case(130, 2, 6, 256, 256, align=8)
    ids, tokens, weights = case.ids(), case.tokens(), case.weights()
    count = np.sum(ids >= 0)
    wanted = reference.permute(tokens, ids, weights, case.problem.num_rows)[:count].astype(np.float64)
    exact = reference.permute(tokens.astype(np.float64), ids, weights, case.problem.num_rows)[:count]
    for rows in simulated(case, "scattered").run(tokens, ids, weights, allow_nan=True):
        found = np.asarray(rows)[:count].astype(np.float64)
        assert np.all(np.abs(found - exact) <= reference.bfloat16_step(exact) * 0.51)
        assert np.mean(found != wanted) < 0.01
