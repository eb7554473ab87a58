"""Mode D of the fused mixture-of-experts kernel with rows picked out by expert: shapes, routings, formats and bad values on simulated devices."""

from dataclasses import replace

import numpy as np
import pytest
from fused_moe_driver import Layer, check
from fused_moe_inputs import make
from simulator import Mode

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem

LATE: tuple[Mode, ...] = ("on_wait",)
ONE_TILE, TILES = Config("D", 256, 2, compact_rows=32), Config("D", 128, 2, compact_rows=32)

# T, E, K, H, I, D; see `Problem`. A case is a problem, a config and routings.
CASES = {
    # 40 rows of one expert are two products, whose sums wait for the second tile.
    "one device": (
        Problem(40, 6, 2, 256, 256, 1),
        TILES,
        ("uniform", "one expert", "duplicates", "nothing"),
    ),
    # 70 tokens in products of 64 rows: the last ones reach beyond the 96 rows there are of the group.
    "products larger than what is left": (
        Problem(70, 4, 2, 128, 256, 2, down_bias=True),
        replace(ONE_TILE, compact_rows=64),
        ("one expert", "idle device"),
    ),
    "nothing divides": (
        Problem(37, 5, 4, 200, 300, 2, gate_up_bias=True, activation=Activation("gelu")),
        Config("D", 128, 3, compact_rows=32),
        ("padding", "skewed"),
    ),
    "three devices, all tokens everywhere": (
        Problem(
            35, 7, 3, 256, 384, 3, gate_up_bias=True, down_bias=True, sequence_parallel=False,
            activation=Activation("swigluoai", 1.0, 1.3), output_gather_dtype="int8",
        ),
        TILES,
        ("one device", "partial"),
    ),
    "post norm": (
        Problem(34, 8, 2, 200, 256, 4, post_norm=PostNorm(1e-2), down_bias=True),
        TILES,
        ("one expert", "duplicates"),
    ),
    "scale on input": (
        Problem(36, 4, 3, 256, 256, 2, scale_on_input=True, gate_up_bias=True, down_bias=True),
        ONE_TILE,
        ("duplicates", "partial"),
    ),
    # Experts on lanes beyond the first register, and more tokens than one product has.
    "many experts": (Problem(33, 300, 10, 128, 128, 2), Config("D", 128, 3, compact_rows=32), ("uniform",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_compact_rows(name):
    check(*CASES[name])


# By format: a problem, and the columns of a tile.
FORMATS = {
    # Neither sums nor what is picked may lose a bit.
    "float32": (Problem(40, 4, 2, 200, 256, 2, dtype="float32", post_norm=PostNorm(1e-3)), 128),
    "fp8_channel": (Problem(40, 4, 2, 128, 256, 2, combine_dtype="float8_e4m3fn"), 256),
    "fp8_block512": (Problem(40, 2, 2, 640, 1024, 1), 512),
    "fp8_block128": (Problem(40, 4, 2, 384, 256, 2), 128),
    "int8_channel": (Problem(40, 4, 2, 200, 300, 2, dispatch_dtype="bfloat16", gate_up_bias=True), 128),
    "w8a16": (Problem(40, 4, 2, 200, 300, 2, sequence_parallel=False), 128),
    "w8a16_block128": (Problem(40, 4, 2, 128, 256, 1), 256),
    "fp4_block512": (Problem(40, 2, 1, 640, 512, 1), 256),
    "mxfp4": (Problem(40, 4, 2, 192, 320, 2, gate_up_bias=True, down_bias=True), 128),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    problem, columns = FORMATS[name]
    check(replace(problem, format=name), Config("D", columns, 2, compact_rows=32), ("one expert", "padding"), LATE)


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_block128"])
def test_a_nan_of_a_token_without_experts_reaches_nobody_in_8_bits(name):
    """One value of a row, so that the row has a maximum; rows are picked by products that have all tokens in them."""
    problem = Problem(40, 4, 2, 256, 256, 2, format=name)
    layer, inputs = Layer(problem, replace(TILES, tile_columns=256)), make(problem, routing="partial")
    (clean,) = layer.run(inputs, LATE)
    idle = np.flatnonzero((inputs.expert_ids < 0).all(axis=1))
    assert len(idle)
    x = inputs.x.copy()
    x[idle, 5] = np.nan
    (result,) = layer.run(replace(inputs, x=x), ("eager",))
    np.testing.assert_array_equal(result, clean)
