"""Combine forward on a simulated device, against loops: types, weights, blocks, panels, granules, and what is not finite.

Compiling a simulated kernel takes far longer than running it, so each is run on several inputs.
"""

import jax.numpy as jnp
import moe_combine_reference as reference
import numpy as np
import pytest
from moe_combine_inputs import Case, bits, given, simulated

CASES = {
    "bfloat16 weights": Case(200, 3, 8, 256, 256, weight_dtype="bfloat16"),
    "float32 weights, two panels": Case(150, 2, 13, 256, 128, align=8),
    "last panel narrower": Case(150, 2, 13, 640, 256, weight_dtype="bfloat16"),
    "float32 rows": Case(130, 2, 6, 256, 128, dtype="float32", align=8),
    "no weights, one block": Case(40, 1, 40, 256, 256, weight_dtype=None, align=8),
    "sums in float32": Case(130, 2, 5, 128, 128, out_dtype="float32"),
    "wide block": Case(300, 2, 7, 128, 128, block_tokens=256),
    # Rows that lie for themselves, of one group of lanes more than there are columns.
    "row by row": Case(200, 3, 9, 256, 256, align=1, row_lanes=3),
}


def rows_as_given(case, rows):
    """[R, H], or [R, L, 128] with NaN in the columns that are not meant."""
    if case.align > 1:
        return rows
    lanes = case.problem.row_lanes
    missing = lanes * 128 - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=np.nan).reshape(len(rows), lanes, 128)


@pytest.mark.parametrize("name", CASES)
def test_weighted_sums(name):
    """Within a step of the type: half of one for rounding, and what float32 and a weight of 16 bits leave over in sums that cancel."""
    case = CASES[name]
    simulation = simulated(case, "sums")
    for seed, routing in enumerate(("partial", "skewed", "by block", "few", "none")):
        ids, weights = case.ids(seed, routing), case.weights(seed)
        rows = case.rows(ids, seed)
        exact = reference.combine(rows, ids, weights)
        sizes = reference.combine(np.abs(rows), ids, None if weights is None else np.abs(weights))
        wide = case.problem.out_type == "float32"
        left_over = sizes * (2.0**-20 if case.problem.num_parts == 1 else 2.0**-16)
        for sums in simulation.run(*given(rows_as_given(case, rows), ids, weights)):
            assert sums.dtype == jnp.dtype(case.problem.out_type)
            off = np.abs(np.asarray(sums).astype(np.float64) - exact)
            assert np.all(off <= left_over + (0 if wide else reference.bfloat16_step(exact) * 0.5))


def test_float32_weights_are_not_rounded():
    """The kernel is a hundred times closer to the formula with its own weights than to that with weights rounded to bfloat16."""
    case = CASES["sums in float32"]
    ids, weights = case.ids(), case.weights()
    rows = case.rows(ids)
    exact = reference.combine(rows, ids, weights)
    rounded = reference.combine(rows, ids, weights.astype(jnp.bfloat16))
    for sums in simulated(case, "sums").run(rows, ids, weights):
        error = np.abs(np.asarray(sums, np.float64) - exact).mean()
        assert error * 100 < np.abs(np.asarray(sums, np.float64) - rounded).mean()


@pytest.mark.parametrize("name", ["last panel narrower", "float32 rows", "float32 weights, two panels"])
def test_what_is_not_finite_stays_with_its_token(name):
    """Tokens whose rows are finite get the same bits as without it; with weight 0 it does not count."""
    case = CASES[name]
    ids, weights = case.ids(routing="uniform"), case.weights()
    place = reference.rows_of(ids)
    weights[17, 1] = 0.0
    rows = case.rows(ids)
    simulation = simulated(case, "sums")
    clean = simulation.run(rows, ids, weights)

    spoilt = rows.copy()
    spoilt[place[3, 0]] = np.nan
    spoilt[place[60, 1], 5] = np.inf
    spoilt[place[-1, 0], -1] = -np.inf  # the last block, in the narrower panel where there is one
    spoilt[place[17, 1]] = np.nan
    wanted = np.zeros((len(ids), case.hidden), bool)
    wanted[3] = wanted[60, 5] = wanted[-1, -1] = True
    for sums, before in zip(simulation.run(spoilt, ids, weights, allow_nan=True), clean, strict=True):
        found = np.asarray(sums).astype(np.float32)
        np.testing.assert_array_equal(np.isnan(found), wanted)
        np.testing.assert_array_equal(bits(sums)[~wanted], bits(before)[~wanted])
