"""The other tests of `moe_combine` can fail: small faults, planted while a kernel is traced, and what must notice each."""

import inspect

import jax.numpy as jnp
import moe_combine_reference as reference
import numpy as np
import pytest
from moe_combine_inputs import Case, given, simulated
from simulator import FaultKind, KernelFault

from tpu_serve.kernels.moe_combine import selection
from tpu_serve.kernels.moe_combine.windows import Windows

# Three blocks of tokens, which share granules.
ONE_PANEL = Case(300, 1, 13, 128, 128, "uniform", weight_dtype=None)
TWO_PANELS = Case(300, 1, 13, 256, 128, "uniform", weight_dtype=None)
SUMS = Case(150, 1, 5, 128, 128, "uniform", align=8, out_dtype="float32")


def traced_anew(case, operation):
    """Not from the cache, which holds kernels without a fault."""
    return simulated.__wrapped__(case, operation)


def skip(monkeypatch, *names):
    for name in names:
        assert inspect.isfunction(getattr(Windows, name))
        monkeypatch.setattr(Windows, name, lambda *arguments: None)


def rows_lost(case, *modes):
    """Rows of the scatter direction that are not their token's, in the worse order of copies."""
    ids, tokens = case.ids(), case.tokens()
    wanted, count = reference.permute(tokens, ids, None, case.problem.num_rows), np.sum(ids >= 0)
    outputs = traced_anew(case, "scattered").run(tokens, ids, modes=modes or ("on_wait", "eager"), allow_nan=True)
    return max(int(np.any(np.asarray(rows)[:count] != wanted[:count], axis=1).sum()) for rows in outputs)


def test_without_reading_back_rows_of_earlier_blocks_are_lost(monkeypatch):
    skip(monkeypatch, "stage", "wait_staged")
    assert rows_lost(ONE_PANEL) > 10


# Where nobody waits for a copy it never moves in the other order, and is left behind.
def test_what_is_read_back_must_have_arrived(monkeypatch):
    skip(monkeypatch, "wait_staged")
    with pytest.raises(KernelFault) as caught:
        rows_lost(TWO_PANELS, "eager")
    assert caught.value.kind is FaultKind.RACE


def test_what_is_read_back_must_have_been_written(monkeypatch):
    skip(monkeypatch, "wait")
    with pytest.raises(KernelFault) as caught:
        rows_lost(ONE_PANEL, "eager")
    assert caught.value.kind is FaultKind.RACE


def test_without_a_second_look_nan_spreads_over_the_block(monkeypatch):
    monkeypatch.setattr(selection, "is_finite", lambda values: jnp.full(values.shape, True))
    ids, weights = SUMS.ids(), SUMS.weights()
    rows = SUMS.rows(ids)
    rows[reference.rows_of(ids)[3, 0]] = np.nan
    for sums in traced_anew(SUMS, "sums").run(*given(rows, ids, weights), allow_nan=True):
        assert np.isnan(sums).any(axis=1).sum() > 100
