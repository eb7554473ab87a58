"""The TPU compiler accepts what `check` calls legal: every feature once on a small layer, and some layers of real models.

The whole matrix is `tpu-serve bench kernels --compiled`.
"""

import dataclasses
import functools

import pytest

from tpu_serve.bench.compiled.compiler import compile_here
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.bench.fused_moe import layer
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import check, supports
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem

pytestmark = pytest.mark.aot

devices_of = functools.cache(lambda chip, count: target_devices(topology(chip, count)))


def compiled(problem, chip, **changes):
    mode = changes.pop("mode", None)
    config = dataclasses.replace(heuristic(problem, TPU_CHIPS[chip], mode), **changes)
    assert check(problem, config, TPU_CHIPS[chip]) is None
    made = compile_here(*layer(problem, config, TPU_CHIPS[chip], devices_of(chip, problem.num_devices)))
    assert made.error is None, made.error
    return made, config


def small(num_tokens, **features):
    # Neither size is a multiple of 128: what is padded at load must not be padded again at every call.
    return Problem(num_tokens, 16, 4, 700, 300, 4, **features)


FEATURES = {
    "biases tiled": (
        "v6e",
        {"gate_up_bias": True, "down_bias": True, "activation": Activation("swigluoai")},
        {"tile_columns": 128},
    ),
    "post norm gelu": ("v6e", {"post_norm": PostNorm(1e-6, True), "activation": Activation("gelu")}, {}),
    "all tokens everywhere": ("v5e", {"sequence_parallel": False, "activation": Activation("gelu_tanh")}, {}),
    "weight on the input": ("tpu7x", {"scale_on_input": True}, {}),
    "int8 on the way": ("v5e", {"format": "int8_channel", "combine_dtype": "int8"}, {}),
    "fp8 on the way": ("tpu7x", {"format": "fp8_channel", "combine_dtype": "float8_e4m3fn"}, {}),
    "fp8 gathered": (
        "tpu7x",
        {"format": "fp8_block512", "sequence_parallel": False, "output_gather_dtype": "float8_e4m3fn"},
        {},
    ),
    "float32": ("v6e", {"format": "float32", "dtype": "float32"}, {}),
    "fp8_block128": ("tpu7x", {"format": "fp8_block128"}, {"tile_columns": 128}),
    "w8a16": ("v6e", {"format": "w8a16"}, {}),
    "w8a16_block128": ("v5e", {"format": "w8a16_block128"}, {"tile_columns": 128}),
    "fp4_block512": ("tpu7x", {"format": "fp4_block512"}, {}),
    "mxfp4": ("tpu7x", {"format": "mxfp4"}, {"tile_columns": 128}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_mode_d_with(name):
    chip, features, changes = FEATURES[name]
    made, _ = compiled(small(20, **features), chip, mode="D", **changes)
    assert made.temporary_bytes < 2 * MIB


@pytest.mark.parametrize("name", ["biases tiled", "weight on the input", "int8 on the way", "mxfp4"])
def test_mode_g_with(name):
    chip, features, changes = FEATURES[name]
    compiled(small(130, **features), chip, mode="G", **changes)


@pytest.mark.parametrize(
    ("chip", "changes"),
    [
        ("v5e", {"dispatch": "push_ag", "combine": "rs", "block_rows": 64, "tile_rows": 32}),
        ("v6e", {"dispatch": "dedup_push", "rounds": 3, "ring_slots": 4, "tile_columns": 128}),
        ("tpu7x", {"dispatch": "xla_ag", "ring_slots": 2, "tile_columns": 128}),
    ],
)
def test_mode_g_exchanged(chip, changes):
    compiled(small(130), chip, mode="G", **changes)


@pytest.mark.parametrize(
    ("workload", "chip", "format", "num_tokens", "num_devices"),
    [
        ("Qwen3-30B-A3B", "v6e", "bfloat16", 256, 8),
        ("Qwen3-30B-A3B", "tpu7x", "fp8_channel", 256, 8),
        ("Qwen3-30B-A3B", "v6e", "bfloat16", 4096, 8),
        ("Qwen3.5-397B-A17B", "tpu7x", "fp8_channel", 16, 16),
        ("GPT-OSS-120B", "tpu7x", "mxfp4", 64, 8),
        ("Gemma4-26B-A4B", "v5e", "int8_channel", 1024, 4),
    ],
)
def test_layers_of_real_models(workload, chip, format, num_tokens, num_devices):
    problem = WORKLOADS[workload].problem(num_tokens, num_devices, format)
    made, config = compiled(problem, chip)
    # A copy of a weight at every call would show here. What mode G keeps in HBM is far smaller: tokens of the group and rows that arrive.
    row_bytes = problem.row_lanes * 128 * 2
    rows = problem.group_tokens + problem.local_tokens * problem.top_k
    assert made.temporary_bytes < (2 * MIB if config.mode == "D" else 4 * MIB + 2 * rows * row_bytes)


def test_what_is_refused_is_refused_by_the_compiler_too():
    """The numbers behind two refusals: a type without arithmetic, and more VMEM than there is."""
    fp4 = small(20, format="fp4_block512")
    assert "float8_e4m3fn, which v6e has no arithmetic for" in supports(fp4, TPU_CHIPS["v6e"])
    wide = WORKLOADS["Qwen3-Coder-480B-A35B"].problem(256, 4, "bfloat16")
    config = Config("D", 2560, 3)
    assert "MiB of VMEM; tpu7x has" in check(wide, config, TPU_CHIPS["tpu7x"])
    lenient = dataclasses.replace(TPU_CHIPS["tpu7x"], vmem_bytes=2**40)
    made = compile_here(*layer(wide, config, lenient, devices_of("tpu7x", 4)))
    assert made.error is not None
