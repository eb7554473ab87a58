"""The entries that are halves of mode G: each alone against plain arithmetic, and both together against the whole."""

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from fused_moe_driver import AXIS, compare, mesh_of, padded_arguments, tokens_of, tokens_spec
from fused_moe_inputs import Inputs, make
from fused_moe_schedule import visits_of
from jax.sharding import PartitionSpec as P
from simulator import simulate

from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2 import reference, tolerance
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.entries import ag_gmm1, gmm2_push
from tpu_serve.kernels.fused_moe_v2.legality import max_visits
from tpu_serve.kernels.fused_moe_v2.op import fused_moe_v2
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem
from tpu_serve.kernels.fused_moe_v2.quantise import dequantise

pytestmark = pytest.mark.usefixtures("plain_sums")

G = Config("G", 128, 2, block_rows=32, tile_rows=32)
CASES = {
    "pushed in rounds": (
        Problem(41, 5, 2, 200, 300, 2, gate_up_bias=True, down_bias=True, activation=Activation("swigluoai", 1.0, 1.3)),
        replace(G, dispatch="push_ag", rounds=2),
        "skewed",
    ),
    "8 bits": (
        Problem(13, 7, 2, 128, 256, 3, format="fp8_channel", post_norm=PostNorm(1e-3), combine_dtype="float8_e4m3fn"),
        replace(G, dispatch="dedup_push"),
        "padding",
    ),
    "all tokens on every device": (
        Problem(10, 5, 3, 128, 128, 2, scale_on_input=True, sequence_parallel=False),
        replace(G, combine="rs"),
        "duplicates",
    ),
}  # fmt: skip


def ids_of_group(problem: Problem, inputs: Inputs) -> np.ndarray:
    """i32[G, K] as the entries see them: an expert once a token where its weight is on the input."""
    missing = problem.group_tokens - problem.num_tokens
    ids = np.concatenate([inputs.expert_ids, np.full((missing, problem.top_k), -1, np.int32)])
    if problem.scale_on_input:
        for row in ids:
            for choice in range(problem.top_k):
                row[choice] = -1 if row[choice] in row[:choice] else row[choice]
    return ids


def call_with(interpret: Any, problem: Problem, config: Config) -> dict[str, Any]:
    return {"problem": problem, "config": config, "call": Call(AXIS, cpu_chip(), interpret)}


def expected_inner(problem: Problem, config: Config, inputs: Inputs, expert: int, slots: Any) -> np.ndarray:
    """f64[rows, I] of one visit."""
    p, form = problem, problem.weights
    plain = dequantise(inputs.weights, form)
    tokens = [slot.owner * p.local_tokens + slot.token for slot in slots]
    rows = reference.rounded(inputs.x[tokens].astype(np.float64), p.dispatch_type)
    rows = reference.rounded(rows, form.activation)
    halves = []
    for half in range(2):
        values = rows @ np.asarray(plain.gate_up)[expert, half, : p.hidden, : p.intermediate].astype(np.float64)
        if p.scale_on_input:
            ids, weights = inputs.expert_ids[tokens], inputs.routing_weights[tokens]
            values = values * np.where(ids == expert, weights, 0).sum(axis=1, keepdims=True)
        if p.gate_up_bias:
            values = values + np.asarray(plain.gate_up_bias)[expert, half, :, : p.intermediate]
        halves.append(values)
    return reference.activate(p.activation, *halves)


@pytest.mark.parametrize("name", CASES)
def test_both_halves_are_the_whole(name):
    problem, config, routing = CASES[name]
    p, inputs = problem, make(problem, routing=routing)
    tokens, own = tokens_spec(p), P(AXIS)
    is_same = not p.weights.quantises_rows  # otherwise the halves round to the tokens' type before they quantise

    def program(interpret: Any, *arguments: Any) -> Any:
        named = call_with(interpret, p, config)

        def run(x: jax.Array, ids: jax.Array, routing: jax.Array, weights: Any, norm: Any) -> Any:
            inner = ag_gmm1(x, ids, routing, weights, **named)
            results = [gmm2_push(inner, ids, routing, weights, norm, **named)]
            if is_same:
                results.append(fused_moe_v2(x, ids, routing, weights, norm, **named))
            return inner.rows[None], *(y if p.sequence_parallel else y[None] for y in results)

        specs = (tokens, tokens, tokens, own, P())
        return jax.shard_map(run, mesh=mesh_of(p.num_devices), in_specs=specs, out_specs=own, check_vma=False)(
            *arguments
        )

    # What is beyond the rows of a visit was never written.
    outputs = simulate(program, *padded_arguments(p, inputs), allow_nan=True)
    for rows, *results in outputs:
        halves, *wholes = (tokens_of(p, y) for y in results)
        compare(p, config, inputs, halves, "halves", ["strict", "dense"] if is_same else ["dense"])
        for whole in wholes:
            np.testing.assert_array_equal(halves, whole)
        _check_inner(p, config, inputs, np.asarray(rows).astype(np.float32))


def _check_inner(p: Problem, config: Config, inputs: Inputs, rows: np.ndarray) -> None:
    """rows f32[D, N, M, I] of the first half."""
    found, expected = [], []
    for device in range(p.num_devices):
        visits = visits_of(p, config, device, ids_of_group(p, inputs))
        for number, visit in enumerate(visits):
            found.append(rows[device, number, : len(visit.slots), : p.intermediate])
            expected.append(expected_inner(p, config, inputs, visit.expert, visit.slots))
        assert len(visits) <= max_visits(p, config) == rows.shape[1]
    errors = tolerance.errors(np.concatenate(found), np.concatenate(expected))
    assert errors.within(tolerance.tolerance(p, is_strict=True)), errors


def test_the_second_half_takes_any_rows():
    """Rows that no first half has made, with garbage beyond the visits."""
    p, config = Problem(11, 4, 2, 128, 256, 2, down_bias=True), replace(G, dispatch="dedup_push", rounds=2)
    inputs, random = make(p, routing="partial"), np.random.default_rng(5)
    given = np.full((p.num_devices, max_visits(p, config), config.block_rows, p.intermediate), np.nan, np.float32)
    result = np.zeros((p.num_tokens, p.hidden))
    plain = dequantise(inputs.weights, p.weights)
    for device in range(p.num_devices):
        for number, visit in enumerate(visits_of(p, config, device, ids_of_group(p, inputs))):
            for row, slot in enumerate(visit.slots):
                inner = random.normal(size=p.intermediate).astype(inputs.x.dtype)
                given[device, number, row] = inner
                token = slot.owner * p.local_tokens + slot.token
                down, bias = (np.asarray(array)[visit.expert] for array in (plain.down, plain.down_bias))
                finished = reference.rounded((inner.astype(np.float64) @ down + bias), p.combine_type)
                result[token] += inputs.routing_weights[token, slot.choice] * finished[0]

    def program(interpret: Any, inner_rows: jax.Array, *arguments: Any) -> Any:
        named = call_with(interpret, p, config)

        def run(rows: jax.Array, x: jax.Array, ids: jax.Array, routing: jax.Array, weights: Any, _: Any) -> Any:
            inner = ag_gmm1(x, ids, routing, weights, **named)  # for its tables
            return gmm2_push(replace(inner, rows=rows[0]), ids, routing, weights, **named)

        specs = (P(AXIS), P(AXIS), P(AXIS), P(AXIS), P(AXIS), P())
        return jax.shard_map(
            run, mesh=mesh_of(p.num_devices), in_specs=specs, out_specs=P(AXIS), check_vma=False
        )(inner_rows, *arguments)  # fmt: skip

    for output in simulate(program, given.astype(inputs.x.dtype), *padded_arguments(p, inputs)):
        errors = tolerance.errors(tokens_of(p, output), result)
        assert errors.within(tolerance.tolerance(p, is_strict=True)), errors


def test_only_mode_g_has_halves():
    problem, config = Problem(8, 4, 2, 128, 128, 1), Config("D", 128, 2)
    for entry in (
        functools.partial(ag_gmm1, None, None, None, None),
        functools.partial(gmm2_push, None, None, None, None),
    ):
        with pytest.raises(ValueError, match="parts of mode G, not of mode D"):
            entry(**call_with(False, problem, config))
    with pytest.raises(ValueError, match="ring_slots must be at least 2"):
        ag_gmm1(None, None, None, None, **call_with(False, problem, replace(G, ring_slots=1)))
