"""Every number format of the fused mixture-of-experts kernel in both modes, on simulated devices."""

from dataclasses import replace

import pytest
from fused_moe_driver import check
from simulator import Mode

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem

pytestmark = pytest.mark.usefixtures("plain_sums")

LATE: tuple[Mode, ...] = ("on_wait",)
"""One way of moving copies: a format changes what is computed, not what waits for what."""
GPT_OSS = Activation("swigluoai", 1.0, 1.3)
G = Config("G", 128, 2, block_rows=32, tile_rows=32)

# By format: a problem of T, E, K, H, I, D; tile columns; how mode G is run, None for what it does elsewhere; a routing.
CASES = {
    "float32": (
        Problem(11, 6, 3, 200, 300, 2, dtype="float32", post_norm=PostNorm(1e-3), down_bias=True),
        128, {"dispatch": "push_ag", "rounds": 2}, "duplicates",
    ),
    "float32 in two bytes": (
        Problem(
            5, 5, 2, 128, 256, 3, format="float32", dtype="float32", dispatch_dtype="bfloat16", combine_dtype="bfloat16"
        ),
        256, {"dispatch": "dedup_push", "combine": "rs", "rounds": 3}, "padding",
    ),
    "bfloat16": (Problem(9, 6, 2, 128, 256, 2), 128, None, "partial"),
    # A bias of each tile's own; rows are quantised where they arrive.
    "fp8_channel": (
        Problem(
            12, 6, 2, 200, 384, 2, dispatch_dtype="bfloat16", gate_up_bias=True, down_bias=True, activation=GPT_OSS
        ),
        128, {"ring_slots": 3}, "padding",
    ),
    # Rows enter the product as they travelled.
    "fp8_channel that travels": (
        Problem(12, 6, 2, 128, 256, 2, format="fp8_channel", combine_dtype="float8_e4m3fn"),
        128, {"dispatch": "dedup_push", "rounds": 2}, "padding",
    ),
    "fp8_channel scaled on input": (
        Problem(
            10, 6, 2, 128, 256, 2, format="fp8_channel", dtype="float32", dispatch_dtype="float32", scale_on_input=True
        ),
        256, None, "duplicates",
    ),
    # 640 rows are two blocks, the second short; two tiles share a block of the second product.
    "fp8_block512": (Problem(8, 4, 2, 640, 1024, 2, dispatch_dtype="int8"), 256, {"dispatch": "push_ag"}, "padding"),
    # Scales of groups of columns are made where rows arrive, of what travelled with a scale for a row.
    "fp8_block128": (
        Problem(10, 6, 2, 384, 256, 2, dispatch_dtype="float8_e4m3fn", down_bias=True, activation=Activation("gelu")),
        256, {}, "padding",
    ),
    "fp8_block128 in tiles": (
        Problem(10, 6, 2, 200, 256, 1, format="fp8_block128", post_norm=PostNorm(1e-3)), 128, None, "skewed",
    ),
    "int8_channel": (
        Problem(
            12, 6, 2, 200, 300, 2, dispatch_dtype="bfloat16", post_norm=PostNorm(1e-3, plus_one=True), gate_up_bias=True
        ),
        128, None, "partial",
    ),
    "int8_channel that travels": (
        Problem(10, 7, 2, 128, 256, 2, format="int8_channel", combine_dtype="int8"),
        128, {"dispatch": "push_ag", "rounds": 2}, "idle device",
    ),
    "w8a16": (
        Problem(9, 6, 2, 200, 300, 2, gate_up_bias=True, down_bias=True, sequence_parallel=False),
        128, {"combine": "rs"}, "uniform",
    ),
    "w8a16_block128": (Problem(9, 6, 2, 200, 256, 2, dispatch_dtype="int8"), 256, {"dispatch": "dedup_push"}, "padding"),
    "fp4_block512": (
        Problem(8, 4, 2, 640, 512, 2, combine_dtype="float8_e4m3fn", activation=Activation("gelu_tanh")),
        256, {}, "uniform",
    ),
    # As GPT-OSS: neither H nor I of whole lanes.
    "mxfp4": (
        Problem(9, 6, 4, 192, 320, 3, gate_up_bias=True, down_bias=True, activation=GPT_OSS),
        128, {"dispatch": "push_ag", "ring_slots": 3}, "uniform",
    ),
}  # fmt: skip

IN_MODE_G = [name for name, case in CASES.items() if case[2] is not None]


def _problem(name: str) -> Problem:
    problem = CASES[name][0]
    return replace(problem, format=name) if name in FORMATS else problem


def test_every_format_has_a_case_in_both_modes():
    assert FORMATS.keys() <= {problem.format for problem in map(_problem, CASES)}
    elsewhere = {"bfloat16"}
    assert FORMATS.keys() - elsewhere <= {_problem(name).format for name in IN_MODE_G}


@pytest.mark.parametrize("name", CASES)
def test_mode_d(name):
    _, tile_columns, _, routing = CASES[name]
    check(_problem(name), Config("D", tile_columns, 2), (routing,), LATE)


@pytest.mark.parametrize("name", IN_MODE_G)
def test_mode_g(name):
    _, tile_columns, choices, routing = CASES[name]
    check(_problem(name), replace(G, tile_columns=tile_columns, **choices), (routing,), LATE)
