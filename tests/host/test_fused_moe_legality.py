"""Which problems and configs the fused mixture-of-experts kernel accepts, what it says to the others, and the bytes that it counts."""

import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tpu_serve.device.chip import MIB, TPU_CHIPS, cpu_chip
from tpu_serve.kernels.fused_moe_v2.buffers import Buffer, leaves, max_rows, mode_d, mode_g
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.legality import check, max_visits, smem_bytes, supports, vmem_bytes
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem, malformed

V6E, TPU7X = TPU_CHIPS["v6e"], TPU_CHIPS["tpu7x"]
CHIPS = {**TPU_CHIPS, "cpu": cpu_chip()}
# T, E, K, H, I, D.
LAYER = Problem(256, 128, 8, 2048, 768, 8)
SPLIT, WHOLE = {"sequence_parallel": True}, {"sequence_parallel": False}
D, G = Config("D", 256), Config("G", 256)

MALFORMED: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: 0}, f"{name} must be at least 1, got 0")
        for name in ("num_tokens", "num_experts", "top_k", "hidden", "intermediate", "num_devices")
    ),
    ({"top_k": 129}, "top_k 129 of 128 experts is impossible"),
    ({"format": "fp6"}, "format 'fp6' is unknown; known are float32, bfloat16, fp8_channel"),
    ({"dtype": "float16"}, "tokens are bfloat16 or float32, not 'float16'"),
    ({"activation": Activation("relu")}, "activation 'relu' is unknown; known are silu, gelu, gelu_tanh, swigluoai"),
    ({"dispatch_dtype": "int4"}, "dispatch_dtype 'int4' is unknown; known are bfloat16, float32, float8_e4m3fn, int8"),
    ({"combine_dtype": "fp8"}, "combine_dtype 'fp8' is unknown"),
    ({**WHOLE, "output_gather_dtype": "e4m3"}, "output_gather_dtype 'e4m3' is unknown"),
    ({"dispatch_dtype": "float32"}, "dispatch_dtype float32 would send bfloat16 tokens at twice their size"),
    ({**WHOLE, "output_gather_dtype": "float32"}, "output_gather_dtype float32 would send bfloat16 tokens at twice"),
    ({**SPLIT, "output_gather_dtype": "int8"}, "output_gather_dtype has no meaning with sequence parallelism"),
    ({**WHOLE, "dispatch_dtype": "int8"}, "dispatch_dtype has no meaning without sequence parallelism"),
    ({"num_devices": 1, "dispatch_dtype": "int8"}, "dispatch_dtype has no meaning on one device"),
    ({"num_devices": 1, "combine_dtype": "int8"}, "combine_dtype has no meaning on one device"),
    ({**WHOLE, "num_devices": 1, "output_gather_dtype": "int8"}, "output_gather_dtype has no meaning on one device"),
    ({"format": "float32"}, "format float32 is for float32 tokens"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_a_malformed_problem_is_refused_on_every_chip(change, message):
    problem = replace(LAYER, **change)
    assert (malformed(problem) or "").startswith(message)
    for chip in CHIPS.values():
        for config in (D, G):
            assert supports(problem, chip) == check(problem, config, chip) == malformed(problem)


RUNS = {
    "v5e": {"float32", "bfloat16", "int8_channel", "w8a16", "w8a16_block128"},
    "v5p": {"float32", "bfloat16", "int8_channel", "w8a16", "w8a16_block128"},
    "v6e": {"float32", "bfloat16", "int8_channel", "w8a16", "w8a16_block128"},
    "tpu7x": FORMATS.keys() - {"int8_channel"},
    "cpu": FORMATS.keys(),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_a_chip_has_arithmetic_for(chip, name):
    problem = replace(LAYER, format=name, dtype="float32" if name == "float32" else "bfloat16")
    reason = supports(problem, CHIPS[chip])
    if name in RUNS[chip]:
        assert reason is None
        return
    if FORMATS[name].activation in CHIPS[chip].peak_ops:
        assert reason == f"format {name} stores float4_e2m1fn, a type that {chip} does not have"
    else:
        start = f"format {name} has products in {FORMATS[name].activation}, which {chip} has no arithmetic for"
        assert reason == f"{start} (it has {', '.join(CHIPS[chip].peak_ops)})"


def test_float32_tokens_are_not_rounded_in_silence():
    for name, form in FORMATS.items():
        reason = supports(replace(LAYER, format=name, dtype="float32"), CHIPS["cpu"])
        if form.activation == "bfloat16":
            assert reason == f"format {name} would round float32 tokens to bfloat16; use bfloat16 tokens"
        else:
            assert reason is None


def changes(config: Config, **change: Any) -> Config:
    return replace(config, **change)


PUSHED = changes(G, dispatch="push_ag")
ILLEGAL: list[tuple[dict[str, Any], Config, str]] = [
    ({}, changes(D, mode="X"), "mode 'X' is unknown; known are D, G"),
    ({}, changes(D, tile_columns=0), "tile_columns 0 must be a multiple of 128 that divides 768"),
    ({}, changes(G, tile_columns=192), "tile_columns 192 must be a multiple of 128 that divides 768"),
    ({}, changes(G, tile_columns=512), "tile_columns 512 must be a multiple of 128 that divides 768"),
    ({"intermediate": 700}, changes(G, tile_columns=512), "tile_columns 512 must be a multiple of 128 that divides 768"),
    (
        {"format": "fp8_block512", "intermediate": 2304}, changes(G, tile_columns=768),
        "tile_columns 768 and scale blocks of 512 rows must divide one another",
    ),
    ({}, changes(D, ring_slots=1), "ring_slots must be at least 2, got 1"),
    ({"num_tokens": 1017}, D, None),
    ({}, changes(D, compact_rows=256), None),
    ({}, changes(D, compact_rows=48), "compact_rows 48 must be 0 or a multiple of 32"),
    ({}, changes(D, compact_rows=-32), "compact_rows -32 must be 0 or a multiple of 32"),
    ({}, changes(D, compact_rows=288), "compact_rows 288 are more than the 256 tokens"),
    ({"num_tokens": 1025}, D, "mode D is for at most 1024 tokens, not 1032"),
    ({"scale_on_input": True, "gate_up_bias": True, "down_bias": True}, G, None),
    ({}, changes(G, dispatch="a2a"), "dispatch 'a2a' is unknown; known are xla_ag, push_ag, dedup_push"),
    ({}, changes(G, combine="psum"), "combine 'psum' is unknown; known are push, rs"),
    ({}, changes(G, tile_rows=0), "tile_rows 0 must be a multiple of 32"),
    ({}, changes(G, tile_rows=48), "tile_rows 48 must be a multiple of 32"),
    ({}, changes(G, block_rows=0), "block_rows 0 must be a multiple of tile_rows 128"),
    ({}, changes(G, block_rows=192), "block_rows 192 must be a multiple of tile_rows 128"),
    ({}, changes(G, combine_tokens=0), "combine_tokens 0 must be a multiple of 16"),
    ({}, changes(G, combine_tokens=24), "combine_tokens 24 must be a multiple of 16"),
    ({}, changes(PUSHED, rounds=0), "rounds 0 must lie between 1 and the 8 devices"),
    ({}, changes(PUSHED, rounds=9), "rounds 9 must lie between 1 and the 8 devices"),
    ({}, changes(PUSHED, rounds=8), None),
    ({}, changes(G, rounds=2), "rounds need a dispatch that pushes"),
    (WHOLE, PUSHED, "dispatch push_ag needs sequence parallelism"),
    (WHOLE, changes(G, dispatch="dedup_push"), "dispatch dedup_push needs sequence parallelism"),
    ({"combine_dtype": "int8"}, changes(G, combine="rs"), "combine rs sums on the way and cannot carry int8"),
    ({"combine_dtype": "float8_e4m3fn"}, changes(G, combine="rs"), "combine rs sums on the way and cannot carry float8"),
    ({"combine_dtype": "float32"}, changes(G, combine="rs"), None),
    ({**WHOLE, "output_gather_dtype": "int8"}, changes(G, combine="rs"), "combine rs sums for every device at once"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "config", "message"), ILLEGAL)
def test_an_illegal_config_is_refused_by_its_first_reason(change, config, message):
    chip = TPU7X if "format" in change else V6E
    reason = check(replace(LAYER, **change), config, chip)
    assert reason is None if message is None else (reason or "").startswith(message), reason


@pytest.mark.parametrize("block", [128, 512])
def test_tiles_and_scale_blocks_that_divide_one_another_are_legal(block):
    problem = replace(LAYER, format=f"fp8_block{block}", intermediate=1024)
    assert all(check(problem, replace(G, tile_columns=columns), TPU7X) is None for columns in (128, 256, 512, 1024))
    # One tile of all columns has whole blocks and the rest.
    assert check(replace(problem, intermediate=768), replace(G, tile_columns=768), TPU7X) is None


def test_a_buffer_takes_whole_registers():
    assert Buffer((3, 5, 130), "float32").num_bytes == 3 * 8 * 256 * 4
    assert Buffer((3, 5, 130), "bfloat16").num_bytes == 3 * 16 * 256 * 2
    assert Buffer((3, 5, 130), "int8").num_bytes == 3 * 32 * 256
    assert Buffer((64, 128), "float4_e2m1fn").num_bytes == 64 * 128, "the compiler gives 4-bit values a byte each"
    assert Buffer((3, 1, 130), "int8").num_bytes == 3 * 256  # a single row is not padded
    assert Buffer((130,), "float32").num_bytes == 256 * 4
    assert Buffer((4,), space="dma").num_bytes == Buffer((2, 128), space="smem").num_bytes == 0


def test_vmem_bytes_of_mode_d_counted_by_hand():
    """10 tokens of 200 columns, which are 256 in a product and 8 x 128 on their way; 10 rows are 32 in a product."""
    problem = Problem(10, 6, 2, 200, 256, 2, post_norm=PostNorm(1e-6), down_bias=True)
    parts = {
        "three slots of gate and up": 3 * 2 * 256 * 128 * 2,
        "three slots of down": 3 * 128 * 256 * 2,
        "three slots of a bias": 3 * 1 * 256 * 4,
        "tokens as they travel": 10 * 16 * 128 * 2,
        "tokens in the product": 32 * 256 * 2,
        "between the products": 32 * 128 * 2,
        "sums, and those of one expert": 2 * 32 * 256 * 4,
        "norm": 256 * 4,
        "partial sums that leave and that come": 2 * 10 * 16 * 128 * 2,
        "routing weights": 32 * 128 * 4,
    }
    buffers = [buffer for _, buffer in leaves(mode_d(problem, Config("D", 128)))]
    assert sum(buffer.num_bytes for buffer in buffers) == sum(parts.values())
    values = 32 * (4 * 128 + 2 * 256) * 4
    assert vmem_bytes(problem, Config("D", 128)) == sum(parts.values()) + values + MIB


def test_vmem_bytes_of_picked_rows_counted_by_hand():
    """70 tokens, 96 in products with all of them; up to 128 of them in two products of 64 rows. 3 experts are 8 sublanes of weights."""
    problem = Problem(70, 6, 2, 256, 256, 2, format="fp8_channel")
    config = Config("D", 128, 2, compact_rows=64)
    parts = {
        "two slots of gate and up, and their scales": 2 * 2 * (256 * 128 + 128 * 4),
        "two slots of down, and its scales": 2 * (128 * 256 + 256 * 4),
        "tokens as they travel, and their scales": 70 * 32 * 128 + 128 * 4,
        "tokens in the product, and their scales": 96 * 256 + 96 * 128 * 4,
        "picked ones, their scales and weights": 128 * 256 + 2 * 128 * 128 * 4,
        "between the products, until they are quantised": 64 * 128 * 4,
        "sums, and those of one expert": (96 + 128) * 256 * 4,
        "partial sums that leave and that come": 2 * 70 * 16 * 128 * 2,
        "routing weights by expert, and ranks of the rows that have them": 2 * 8 * 128 * 4,
        "ranks by token, and which tokens are not finite": 2 * 96 * 128 * 4,
    }
    buffers = [buffer for _, buffer in leaves(mode_d(problem, config))]
    assert sum(buffer.num_bytes for buffer in buffers) == sum(parts.values())
    values = (64 * 4 * 128 + 96 * 2 * 256) * 4
    assert vmem_bytes(problem, config) == sum(parts.values()) + values + MIB


def test_vmem_bytes_of_mode_g_counted_by_hand():
    """Two visits of 64 rows that travel in 8 bits both ways, weights in 8 bits with a scale a column."""
    problem = Problem(
        1000, 6, 2, 2048, 512, 2, format="fp8_channel", dispatch_dtype="float8_e4m3fn", combine_dtype="float8_e4m3fn"
    )
    config = Config("G", 256, 2, block_rows=64, tile_rows=32, dispatch="push_ag")
    parts = {
        "two slots of gate and up, and their scales": 2 * 2 * (2048 * 256 + 256 * 4),
        "two slots of down, and its scales": 2 * (256 * 2048 + 2048 * 4),
        "rows as they come, a register of 8 bits being 32 rows": 2 * 64 * 32 * 128,
        "their scales, in every lane": 2 * 64 * 128 * 4,
        "rows in the product, and their scales": 64 * 2048 + 64 * 128 * 4,
        "between the products, until they are quantised": 32 * 256 * 4,
        "sums": 64 * 2048 * 4,
        "rows as they go, and their scales": 2 * 64 * 32 * 128 + 2 * 64 * 128 * 4,
    }
    buffers = [buffer for _, buffer in leaves(mode_g(problem, config))]
    assert sum(buffer.num_bytes for buffer in buffers) == sum(parts.values())
    values = 32 * (4 * 256 + 2 * 2048) * 4
    assert vmem_bytes(problem, config) == sum(parts.values()) + values + MIB


def test_smem_bytes_counted_by_hand():
    """1000 tokens, two choices, at most two experts of the three of a device; all three have a last visit that is not full."""
    problem = Problem(1000, 6, 2, 2048, 512, 2, dispatch_dtype="int8", scale_on_input=True)
    config = Config("G", 256, block_rows=64, tile_rows=32, dispatch="dedup_push", rounds=2)
    assert max_rows(problem) == 2000
    assert max_visits(problem, config) == 31 + 3 * 2
    words = {
        "visits": 7 * 37,
        "runs of experts, rounds and devices": 4 * 3 * 2 * 2,
        "totals": 3 + 2,
        "runs to send, and how many": 2 * 2 * 250 + 2 * 2,
        "scales of tokens": 1000,
        "windows of tokens and of their weights, two visits from two devices": 2 * 2 * 2 * 2 * 128,
    }
    assert smem_bytes(problem, config) == 4 * sum(words.values())
    assert smem_bytes(problem, Config("D", 256)) == 4 * (3 + 1 + 3), "active experts, how many, and the rows of each"


def test_vmem_is_refused_one_byte_beyond_the_share():
    needed = vmem_bytes(LAYER, D)
    enough = next(size for size in range(int(needed / 0.92), 2 * needed) if int(size * 0.92) >= needed)
    assert check(LAYER, D, replace(V6E, vmem_bytes=enough)) is None
    reason = check(LAYER, D, replace(V6E, vmem_bytes=enough - 2))
    assert reason == (
        f"mode D with tile_columns 256, ring_slots 3, block_rows 128 needs {needed / MIB:.1f} MiB of VMEM; "
        f"v6e has {int((enough - 2) * 0.92) / MIB:.1f} MiB for it"
    )


def test_a_stage_alone_needs_less():
    wide = replace(LAYER, hidden=8192, intermediate=2048)
    config = Config("G", 512, ring_slots=5)
    assert re.match(r"mode G with tile_columns 512, .* MiB of VMEM", check(wide, config, V6E) or "")
    assert check(wide, config, V6E, "first") is None
    assert check(wide, config, V6E, "second") is None


def test_tables_that_do_not_fit_are_refused():
    many = replace(LAYER, num_tokens=140000)
    config = Config("G", 256, block_rows=32, tile_rows=32)
    kib = smem_bytes(many, config) / 1024
    assert check(many, config, V6E) == f"the tables need {kib:.0f} KiB of SMEM; v6e has 922 KiB for them"
    assert check(many, replace(config, block_rows=128, tile_rows=128), V6E) is None


def test_nothing_here_needs_jax():
    program = "import sys, tpu_serve.kernels.fused_moe_v2.legality; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_final_sum_must_fit_too():
    layer = Problem(8192, 64, 8, 7168, 256, 2)  # more rows than VMEM holds: two steps of them are there at a time
    config = Config("G", 256, 2, dispatch="xla_ag")
    assert check(layer, config, TPU7X) is None
    reason = check(layer, replace(config, combine_tokens=512), TPU7X)
    assert reason == "the final sum of 512 tokens a step needs 185.0 MiB of VMEM; tpu7x has 64.0"
    assert check(layer, replace(config, combine_tokens=512), TPU7X, "first") is None  # which sums nothing
