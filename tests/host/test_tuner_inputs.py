"""What the tuner measures with, and how it tells a wrong result from a right one."""

import dataclasses

import jax
import numpy as np
import pytest

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2 import reference
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise
from tpu_serve.moe_plan.path import without_xla
from tpu_serve.tuner import inputs, measuring
from tpu_serve.tuner.inputs import ROUTINGS, Routing
from tpu_serve.tuner.measuring import CHECKED_TOKENS, Measurer
from tpu_serve.tuner.trial import Task

P = Problem(62, 20, 3, 128, 200, 4)
UNIFORM, ZIPF = ROUTINGS


def shares_of(problem, routing):
    ids = inputs.expert_ids(problem, routing)
    return np.bincount(ids[ids >= 0], minlength=problem.num_experts) / problem.num_tokens


def test_tokens_choose_different_experts_and_padding_rows_none():
    for routing in ROUTINGS:
        ids = inputs.expert_ids(P, routing)
        assert ids.shape == (64, 3)
        assert ids.dtype == np.int32
        assert (ids[62:] == -1).all()
        assert all(len(set(row)) == 3 for row in ids[:62].tolist())
        assert (ids[:62] >= 0).all()
        assert ids.max() < 20


def test_how_often_experts_are_chosen():
    many = dataclasses.replace(P, num_tokens=40000, top_k=1)
    assert shares_of(many, UNIFORM) == pytest.approx(1 / 20, rel=0.1)
    popular = np.sort(shares_of(many, ZIPF))[::-1]
    assert popular[:4] == pytest.approx(popular[0] / np.arange(1, 5), rel=0.1)
    counts = tuple(float(expert % 4) for expert in range(20))
    assert shares_of(many, Routing("capture:x", counts)) == pytest.approx(np.array(counts) / 30, rel=0.1)
    two = tuple(float(expert in (3, 7)) for expert in range(20))
    ids = inputs.expert_ids(P, Routing("capture:x", two))[:62]
    assert {tuple(sorted(row)) for row in ids.tolist()} == {(-1, 3, 7)}


@pytest.mark.parametrize("format", ["bfloat16", "int8_channel", "fp8_block128", "mxfp4"])
def test_weights_are_of_the_format_and_every_experts_are_different(format):
    problem = dataclasses.replace(P, format=format, gate_up_bias=True, down_bias=True)
    weights = inputs.expert_weights(problem)
    assert weights.gate_up.shape == (20, 2, 128, 256)
    plain = dequantise(weights, problem.weights)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        values = np.asarray(getattr(plain, name))
        values = values[..., : 128 if name.startswith("down") else 200]
        np.testing.assert_array_equal(values[9], np.roll(values[1], 1, axis=-1), err_msg=f"{name} and its scales moved")
        assert len({one.tobytes() for one in values}) == 20


def test_results_are_of_the_tokens_order_of_size():
    x, shares = inputs.tokens_and_weights(P)
    result = reference.dense(P, x, inputs.expert_ids(P, UNIFORM), shares, inputs.expert_weights(P))
    assert 0.1 < result.std() < 3


def test_tokens_are_sampled_from_the_first_to_the_last():
    assert inputs.sampled(5, 16).tolist() == [0, 1, 2, 3, 4]
    some = inputs.sampled(4096, 16)
    assert (some[0], some[-1], len(some)) == (0, 4095, 16)
    assert set(np.diff(some)) == {273}


class Checked:
    """A measurer without a kernel: results are made up."""

    def __init__(self):
        self.measurer = Measurer([], cpu_chip())
        x, shares = inputs.tokens_and_weights(P)
        self.arrays = x, inputs.expert_ids(P, UNIFORM), shares
        self.weights = inputs.expert_weights(P)
        self.right = reference.dense(P, *self.arrays, self.weights)

    def reason(self, result, columns=128):
        task = Task("some", cpu_chip(), P, Config("D", columns))
        return self.measurer._objection(task, UNIFORM, self.arrays, self.weights, result)[0]


def test_right_results_pass():
    checked = Checked()
    assert checked.reason(checked.right) is None
    assert checked.reason(checked.right * 1.0005, 256) is None


def test_a_wrong_sampled_token_is_wrong():
    for value in (0.0, np.nan, np.inf):
        checked = Checked()
        wrong = checked.right.copy()
        wrong[61, 5:9] = value
        assert "of the reference" in checked.reason(wrong)


def test_any_wrong_token_is_wrong_where_another_config_has_passed():
    checked = Checked()
    assert checked.reason(checked.right) is None
    place = next(token for token in range(62) if token not in inputs.sampled(62, CHECKED_TOKENS))
    for value in (0.0, np.nan):
        wrong = checked.right.copy()
        wrong[place] = value
        assert "of another config's" in checked.reason(wrong)


def test_a_first_config_that_is_refused_spoils_no_later_one():
    """What others are compared with has passed itself."""
    checked = Checked()
    place = next(token for token in range(62) if token not in inputs.sampled(62, CHECKED_TOKENS))
    wrong = checked.right.copy()
    wrong[place] = np.nan
    assert "the result is wrong" in checked.reason(wrong)
    assert checked.reason(checked.right, 256) is None


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(measuring, "fused_moe_v2", lambda x, *arrays, **options: x)
    monkeypatch.setattr(measuring, "time_calls", lambda *arguments, **options: pytest.fail("timed"))
    problem = Problem(8, 4, 2, 128, 128, 2)
    trial = Measurer(jax.devices(), cpu_chip()).run(Task("tiny", cpu_chip(), problem, Config("D", 128)))
    assert (trial.outcome, trial.score) == ("refused", None)
    assert trial.reason.startswith("uniform routing: the result is wrong: maximum ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"format": "int8_channel"}, None),
        ({"activation": Activation("gelu")}, None),
        ({"post_norm": PostNorm(1e-6)}, "no norm"),
        ({"down_bias": True}, None),
    ],
)
def test_what_xla_cannot_run(changes, reason):
    found = without_xla(dataclasses.replace(P, **changes))
    assert found is None if reason is None else reason in found
