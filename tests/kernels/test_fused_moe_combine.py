"""The final sum of mode G alone: both ways of reading rows against a sum in float64, and what must make it fail."""

import jax.numpy as jnp
import numpy as np
import pytest
from simulator import simulate

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2 import buffers, combine
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Problem

CONFIG = Config("G", 128, combine_tokens=16)
PROBLEMS = {
    "float32": Problem(37, 4, 3, 200, 128, 2, format="float32", dtype="float32"),
    "bfloat16": Problem(37, 4, 3, 200, 128, 2),
    "int8": Problem(37, 4, 3, 200, 128, 2, combine_dtype="int8"),
}


def inputs(problem, seed=0):
    """Rows of which some hold NaN, and places that never name those; a third of the choices has no row, one token none at all."""
    rng = np.random.default_rng(seed)
    count = buffers.delivered_rows(problem, CONFIG)
    rows = rng.normal(size=(count, problem.row_lanes, 128)) * (40 if problem.combine_type == "int8" else 1)
    scale = None
    if problem.combine_type == "int8":
        rows = np.rint(rows).clip(-127, 127)
        scale = np.broadcast_to(rng.random((count, 1, 1)), (count, 1, 128)).astype(np.float32)
    rows = rows.astype(np.dtype(problem.combine_type))
    if problem.combine_type != "int8":
        rows[::5] = np.nan
    usable = np.setdiff1d(np.arange(count), np.arange(0, count, 5))
    places = rng.choice(usable, (problem.local_tokens, problem.top_k)).astype(np.int32)
    places[rng.random(places.shape) < 1 / 3] = -1
    places[3] = -1
    return rows, scale, places, rng.random(places.shape).astype(np.float32)


def expected(problem, rows, scale, places, weights):
    out = np.zeros((len(places), problem.padded_hidden))
    for token, choices in enumerate(places):
        for choice, place in enumerate(choices):
            if place >= 0:
                row = rows[place].astype(np.float64).reshape(-1)[: problem.padded_hidden]
                out[token] += weights[token, choice] * row * (1 if scale is None else float(scale[place, 0, 0]))
    return out


def errors(problem, monkeypatch, resident):
    monkeypatch.setattr(combine, "combine_is_resident", lambda *given: resident)
    given = inputs(problem)

    def run(interpret, rows, scale, places, weights):
        call = Call("none", cpu_chip(), interpret)
        return combine.combine(problem, CONFIG, call, rows, scale, places, weights, jnp.float32)

    arrays = [None if array is None else jnp.asarray(array) for array in given]
    wanted = expected(problem, *given)
    return [np.abs(np.asarray(found) - wanted).max() / np.abs(wanted).max() for found in simulate(run, *arrays)]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("resident", [True, False])
def test_equals_a_sum_in_float64(name, resident, monkeypatch):
    assert max(errors(PROBLEMS[name], monkeypatch, resident)) < 1e-6


@pytest.mark.parametrize("resident", [True, False])
def test_a_sum_in_bfloat16_is_found(resident, monkeypatch):
    weighted_sum = combine._weighted_sum

    def rounded(slots, row_of, places, weights):
        total = jnp.zeros(())
        for slot in slots:
            total = (total + weighted_sum([slot], row_of, places, weights)).astype(jnp.bfloat16).astype(jnp.float32)
        return total

    monkeypatch.setattr(combine, "_weighted_sum", rounded)
    assert min(errors(PROBLEMS["float32"], monkeypatch, resident)) > 1e-4
