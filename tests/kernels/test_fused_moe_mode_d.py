"""Mode D of the fused mixture-of-experts kernel on simulated devices: shapes, routings and options against the reference."""

import pytest
from fused_moe_driver import check

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem

# T, E, K, H, I, D; see `Problem`. A case is a problem, a config and routings.
CASES = {
    # One device exchanges nothing; fewer slots than tiles, and ids that repeat.
    "one device": (
        Problem(16, 8, 2, 256, 384, 1),
        Config("D", 128, 2),
        ("uniform", "one expert", "duplicates", "nothing"),
    ),
    # 5 experts on 2 devices, 13 tokens, neither H nor I of whole lanes, as many slots as tiles.
    "nothing divides": (
        Problem(13, 5, 4, 200, 300, 2, gate_up_bias=True, activation=Activation("gelu")),
        Config("D", 128, 3),
        ("uniform", "padding", "idle device", "skewed"),
    ),
    # The third device has experts but two tokens too few; one tile an expert and more slots than tiles.
    "few tokens": (Problem(4, 7, 1, 128, 256, 3, down_bias=True), Config("D", 256, 4), ("uniform", "one device")),
    # As GPT-OSS, with clamps that act, on devices that have all tokens.
    "biases and clamps, all tokens everywhere": (
        Problem(
            23,
            8,
            4,
            256,
            384,
            4,
            gate_up_bias=True,
            down_bias=True,
            activation=Activation("swigluoai", 1.0, 1.3),
            sequence_parallel=False,
        ),
        Config("D", 128, 2),
        ("partial", "idle device", "padding"),
    ),
    # The mean over 200 columns is not that over 256.
    "post norm": (
        Problem(11, 6, 2, 200, 256, 2, post_norm=PostNorm(1e-2), down_bias=True, gate_up_bias=True),
        Config("D", 128, 3),
        ("uniform", "duplicates"),
    ),
    "post norm plus one, all tokens everywhere": (
        Problem(
            13,
            16,
            4,
            320,
            256,
            6,
            post_norm=PostNorm(1e-6, plus_one=True),
            sequence_parallel=False,
            output_gather_dtype="int8",
            activation=Activation("gelu_tanh"),
        ),
        Config("D", 128, 2),
        ("idle device", "padding"),
    ),
    "scale on input": (
        Problem(14, 6, 3, 256, 256, 2, scale_on_input=True, gate_up_bias=True, down_bias=True),
        Config("D", 128, 2),
        ("duplicates", "partial"),
    ),
    "scale on input and post norm": (
        Problem(9, 6, 3, 200, 256, 1, scale_on_input=True, post_norm=PostNorm(1e-5)),
        Config("D", 128, 2),
        ("duplicates",),
    ),
    # One token for eight devices: seven own none.
    "one token": (Problem(1, 12, 10, 128, 128, 8, combine_dtype="float8_e4m3fn"), Config("D", 128, 2), ("uniform",)),
    # 256 local experts take two registers of coefficients.
    "512 experts": (Problem(5, 512, 10, 128, 128, 2), Config("D", 128, 3), ("uniform", "one device")),
    # A row is wider than 1024.
    "wide rows": (Problem(6, 4, 2, 1152, 128, 2), Config("D", 128, 2), ("uniform",)),
    "eight choices on three devices": (
        Problem(5, 10, 8, 256, 256, 3, output_gather_dtype="bfloat16", sequence_parallel=False),
        Config("D", 256, 2),
        ("uniform", "one device"),
    ),
    # What is exchanged, in other types than the tokens'.
    "float8 out, int8 back": (
        Problem(10, 6, 2, 256, 256, 4, dispatch_dtype="float8_e4m3fn", combine_dtype="int8"),
        Config("D", 128, 2),
        ("padding", "nothing"),
    ),
    "int8 out, float32 back": (
        Problem(10, 6, 2, 200, 256, 2, dispatch_dtype="int8", combine_dtype="float32"),
        Config("D", 256, 2),
        ("padding",),
    ),
    "float8 output gather": (
        Problem(
            7,
            6,
            2,
            200,
            256,
            3,
            combine_dtype="float8_e4m3fn",
            output_gather_dtype="float8_e4m3fn",
            sequence_parallel=False,
        ),
        Config("D", 128, 3),
        ("padding", "uniform"),
    ),
    "float32 on bfloat16 wires": (
        Problem(
            10,
            6,
            2,
            256,
            256,
            2,
            format="float32",
            dtype="float32",
            dispatch_dtype="bfloat16",
            combine_dtype="bfloat16",
        ),
        Config("D", 128, 2),
        ("partial",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mode_d(name):
    check(*CASES[name])
