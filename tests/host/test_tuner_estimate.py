"""Calculated times of configs: what must cost more does, and bytes are those of the bound."""

import dataclasses

import numpy as np
import pytest

from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.kernels.fused_moe_v2.bound import bound
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.tuner.estimate import LAUNCH_SECONDS, estimate, expected_pieces, outside_seconds

V6E = TPU_CHIPS["v6e"]
DECODE = WORKLOADS["Qwen3-30B-A3B"].problem(64, 8, "bfloat16")
PREFILL = WORKLOADS["Qwen3-30B-A3B"].problem(4096, 8, "bfloat16")
G = Config("G", 256, 3, 128, 128, "xla_ag", "push")


def seconds(problem, config, **changes):
    return estimate(problem, dataclasses.replace(config, **changes), V6E).seconds


@pytest.mark.parametrize(("mean", "size"), [(0.3, 32), (5, 32), (100, 32), (100, 128), (2000, 256)])
def test_pieces_of_an_experts_rows(mean, size):
    rows = np.random.default_rng(0).poisson(mean, 200000)
    assert expected_pieces(mean, size) == pytest.approx((-(-rows // size)).mean(), rel=0.02)


def test_mode_d_reads_every_active_expert_once():
    found = estimate(DECODE, heuristic(DECODE, V6E, "D"), V6E)
    least = bound(DECODE, V6E)
    assert found.weight_bytes == pytest.approx(least.weight_bytes)
    assert least.weight_bytes / V6E.hbm_bytes_per_second < found.seconds < 2 * least.seconds


def test_weights_are_read_again_for_each_block_where_the_ring_does_not_hold_an_expert():
    rows = PREFILL.num_tokens * PREFILL.top_k / PREFILL.num_experts
    once, twice = (estimate(PREFILL, dataclasses.replace(G, ring_slots=slots), V6E) for slots in (3, 2))
    assert PREFILL.padded_intermediate // G.tile_columns == 3
    assert once.weight_bytes == pytest.approx(bound(PREFILL, V6E).weight_bytes)
    assert twice.weight_bytes == pytest.approx(once.weight_bytes * expected_pieces(rows, 128), rel=1e-3)
    assert twice.seconds > once.seconds
    rounds = dataclasses.replace(G, dispatch="push_ag", rounds=2)
    assert estimate(PREFILL, rounds, V6E).weight_bytes == pytest.approx(2 * once.weight_bytes)


def test_padded_rows_cost_products():
    few = WORKLOADS["Qwen3-30B-A3B"].problem(2048, 8, "w8a16")
    parts = [
        estimate(few, dataclasses.replace(G, tile_rows=rows, block_rows=256), V6E).parts["matrix unit"]
        for rows in (128, 256)
    ]
    assert parts[1] > 1.2 * parts[0]


def test_a_row_in_hbm_costs_more_to_gather_than_one_in_vmem():
    four = dataclasses.replace(PREFILL, num_devices=4)  # with eight, as many rows as tokens would be read
    parts = [estimate(four, dataclasses.replace(G, resident=one), V6E).parts for one in (True, False)]
    assert parts[0]["row copies"] < parts[1]["row copies"]
    assert parts[0]["hbm"] < parts[1]["hbm"]


def test_visits_cost_time():
    assert seconds(PREFILL, G, block_rows=128) > seconds(PREFILL, G, block_rows=512)


def test_what_xla_sends_is_no_part_of_a_kernel():
    assert outside_seconds(PREFILL, dataclasses.replace(G, dispatch="push_ag"), V6E) == 0
    gathered = outside_seconds(PREFILL, G, V6E)
    # Eight chips in a grid of 2 x 4, the corners with two links: 7/8 of all tokens over them.
    assert gathered == pytest.approx(LAUNCH_SECONDS + 7 / 8 * 4096 * 2048 * 2 / (2 * V6E.link_bytes_per_second))
    assert outside_seconds(PREFILL, dataclasses.replace(G, combine="rs"), V6E) == pytest.approx(2 * gathered)
    assert outside_seconds(DECODE, Config("D", 768), V6E) == 0
    alone = dataclasses.replace(PREFILL, num_devices=1)
    assert outside_seconds(alone, G, V6E) == 0


def test_a_cpu_has_no_links():
    small = Problem(8, 4, 2, 128, 128, 2)
    assert estimate(small, Config("D", 128), cpu_chip()).parts["links"] == 0


def test_an_unknown_slice_is_an_error():
    with pytest.raises(ValueError, match="no slice of 5 v6e devices"):
        estimate(dataclasses.replace(DECODE, num_devices=5), Config("D", 128), V6E)
