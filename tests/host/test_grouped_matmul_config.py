"""Which grouped products and tiles are legal, what is said of the others, the bytes that are counted, and what the rule of thumb takes."""

import dataclasses

import pytest

from tpu_serve.device.chip import MIB, TPU_CHIPS, cpu_chip
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.kernels.grouped_matmul.config import Config, check, heuristic, max_visits, supported, vmem_bytes
from tpu_serve.kernels.grouped_matmul.problem import Problem

V6E, TPU7X = TPU_CHIPS["v6e"], TPU_CHIPS["tpu7x"]
CHIPS = {**TPU_CHIPS, "cpu": cpu_chip()}
LAYER = Problem(256, 128, 2048, 768)
PAIR = dataclasses.replace(LAYER, num_matrices=2)

MALFORMED = [
    *(({name: 0}, f"{name} must be at least 1, got 0") for name in ("rows", "experts", "n_in", "n_out")),
    ({"n_in": 2880}, "n_in 2880 is not a multiple of 128; fill the weights up with zeros when they are loaded"),
    ({"n_out": 704}, "n_out 704 is not a multiple of 128; fill"),
    ({"dtype": "int8"}, "rows and weights are of type 'int8'; known are bfloat16, float32"),
    ({"out_dtype": "float16"}, "the result are of type 'float16'; known are bfloat16, float32"),
    ({"role": "backward"}, "role 'backward' is unknown; known are forward, input_gradient, weight_gradient"),
    ({"num_matrices": 3}, "num_matrices must be 1 or 2, got 3"),
    ({"activation": Activation()}, "an activation is of the forward products of two matrices"),
    ({"activation": Activation("relu"), "num_matrices": 2}, "activation 'relu' is unknown; known are silu"),
    ({"role": "weight_gradient", "in_place": True}, "weight_gradient writes all of its result and is not in place"),
]


@pytest.mark.parametrize(("change", "message"), MALFORMED)
def test_a_malformed_problem_is_refused_on_every_chip(change, message):
    problem = dataclasses.replace(LAYER, **change)
    for chip in CHIPS.values():
        for reason in (supported(problem, chip), check(problem, Config(64, 128), chip)):
            assert reason is not None
            assert reason.startswith(message)


UNFIT = [
    ({}, {"tile_rows": 8}, "tile_rows 8 must be a multiple of 16"),
    ({}, {"tile_rows": 0}, "tile_rows 0 must be a multiple of 16"),
    ({}, {"tile_columns": 512}, "tile_columns 512 must be a multiple of 128 that divides 768"),
    ({}, {"tile_columns": 64}, "tile_columns 64 must be a multiple of 128 that divides 768"),
    ({"role": "input_gradient"}, {"tile_columns": 768}, "tile_columns 768 must be a multiple of 128 that divides 2048"),
    ({}, {"ring_slots": 1}, "ring_slots must be at least 2, got 1"),
    ({}, {"tile_in": 128}, "tile_in is for weight_gradient, the only one that has tiles of N_in"),
    ({"role": "weight_gradient"}, {"tile_in": 768}, "tile_in 768 must be a multiple of 128 that divides 2048"),
    (
        {"n_in": 6144, "n_out": 2560, "num_matrices": 2},
        {"tile_columns": 2560, "ring_slots": 3},
        "forward with tile_rows 64, tile_columns 2560 needs 184.8 MiB of VMEM; v6e has 117.8 MiB for it",
    ),
    (
        {"rows": 2**22},
        {"tile_rows": 16},
        "forward with tile_rows 16, tile_columns 768 needs 5.0 MiB of SMEM; v6e has 0.9",
    ),
]


@pytest.mark.parametrize(("problem", "config", "message"), UNFIT)
def test_an_illegal_config_is_refused_with_numbers(problem, config, message):
    one, fields = dataclasses.replace(LAYER, **problem), {"tile_columns": 128, **config}
    if "tile_columns" not in config and "rows" in problem:
        fields["tile_columns"] = 768
    reason = check(one, Config(**{"tile_rows": 64, **fields}), V6E)
    assert reason is not None
    assert reason.startswith(message)


def test_bytes_grow_with_what_is_held():
    """Each buffer once: what one more row, slot or matrix adds is what it takes."""
    base = Config(64, 256, 2)

    def added(problem=LAYER, **change):
        return vmem_bytes(problem, dataclasses.replace(base, **change)) - vmem_bytes(problem, base)

    assert added(ring_slots=3) == 2048 * 256 * 2
    assert added(PAIR, ring_slots=3) == 2 * 2048 * 256 * 2
    # Two windows of rows, two of the result, three values.
    assert added(tile_rows=80) == 16 * (2 * 2048 * 2 + 2 * 256 * 2 + 3 * 256 * 4)
    in_place = dataclasses.replace(LAYER, in_place=True, out_dtype="float32")
    assert vmem_bytes(in_place, base) - vmem_bytes(LAYER, base) == 2 * 64 * 256 * (2 * 4 - 2)
    transposed = dataclasses.replace(PAIR, role="input_gradient")
    assert added(transposed, ring_slots=3) == 2 * 768 * 256 * 2
    weights = dataclasses.replace(PAIR, role="weight_gradient")
    wide, narrow = Config(64, 768, tile_in=1024), Config(64, 384, tile_in=1024)
    tile = 2 * 1024 * 384 * (4 + 2 * 2) + 2 * 64 * 2 * 384 * 2  # the sum, two windows of the result, two of dout
    assert vmem_bytes(weights, wide) - vmem_bytes(weights, narrow) == tile + 384 * 4 * (2 * 512 + 64)


def test_visits_are_counted_for_the_worst_sizes():
    assert max_visits(LAYER, Config(64, 128)) == 4 + 128
    assert max_visits(dataclasses.replace(LAYER, rows=257), Config(64, 128)) == 5 + 128


LAYERS = {
    "Qwen3-30B": (128, 2048, 768),
    "Gemma4": (128, 2816, 768),
    "GPT-OSS": (128, 2944, 2944),
    "Qwen3-480B": (160, 6144, 2560),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", LAYERS)
def test_real_layers_get_a_legal_config_in_every_role(name, chip):
    for rows in (8, 256, 16384, 131072):
        for dtype in ("bfloat16", "float32"):
            base = Problem(rows, *LAYERS[name], dtype, num_matrices=2)
            for role in ("forward", "input_gradient", "weight_gradient"):
                problem = dataclasses.replace(base, role=role)
                assert check(problem, heuristic(problem, CHIPS[chip]), CHIPS[chip]) is None
                assert supported(problem, CHIPS[chip]) is None


def test_the_rule_of_thumb():
    """Few rows a group: small tiles of rows; the widest tile of columns that fits; 256 wide ones where the matrix unit is."""
    gate_up = dataclasses.replace(PAIR, activation=Activation())
    assert heuristic(gate_up, V6E) == Config(64, 768, 3)
    assert heuristic(dataclasses.replace(gate_up, rows=40), V6E) == Config(48, 768, 3)
    assert heuristic(dataclasses.replace(gate_up, rows=16384), V6E) == Config(128, 768, 3)
    assert heuristic(dataclasses.replace(gate_up, rows=131072), V6E) == Config(256, 768, 3)
    assert heuristic(dataclasses.replace(gate_up, rows=131072), TPU_CHIPS["v5e"]) == Config(128, 768, 3)
    wide = Problem(256, 160, 6144, 2560, num_matrices=2, activation=Activation())
    assert heuristic(wide, TPU7X) == Config(64, 512, 3)


def test_what_fits_nowhere_is_refused_with_the_smallest_tiles():
    reason = supported(Problem(256, 8, 128 * 1024, 256, "float32"), TPU7X)
    assert reason is not None
    assert reason.startswith("forward with tile_rows 16, tile_columns 128 needs ")
    assert reason.endswith(f"MiB of VMEM; tpu7x has {TPU7X.vmem_bytes * 0.92 / MIB:.1f} MiB for it")


def test_a_type_without_arithmetic_is_refused():
    chip = dataclasses.replace(V6E, peak_ops={"int8": 1.0})
    assert supported(LAYER, chip) == "v6e has no arithmetic for bfloat16 (it has int8)"
