"""A choice with a routing weight of 0 is no choice, before any kernel sees it."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.kernels.fused_moe_v2.op import normal_form
from tpu_serve.kernels.fused_moe_v2.problem import Problem

IDS = np.array([[0, 3], [2, 2], [5, -1]], np.int32)
WEIGHTS = np.array([[0.0, 0.5], [0.75, -0.75], [np.nan, 0.0]], np.float32)


@pytest.mark.parametrize(
    ("scale_on_input", "expected"),
    [
        (False, [[-1, 3], [2, 2], [5, -1]]),
        (True, [[-1, 3], [-1, -1], [5, -1]]),  # what cancels once duplicates are added up is 0 as well
    ],
)
def test_a_weight_of_zero_chooses_nothing(scale_on_input, expected):
    problem = Problem(3, 6, 2, 128, 128, scale_on_input=scale_on_input)
    _, ids, _ = normal_form(problem, None, jnp.asarray(IDS), jnp.asarray(WEIGHTS))
    np.testing.assert_array_equal(ids, expected)
