"""Mode G of the fused mixture-of-experts kernel on simulated devices: schedules, exchanges and routings against the reference."""

import pytest
from fused_moe_driver import check

from tpu_serve.kernels.fused_moe_v2 import combine
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem

# T, E, K, H, I, D; see `Problem`. A case is a problem, a config and routings.
RING = {
    # 70 rows of one expert are three visits; both tiles stay for all of them, and the next expert's find room beside them.
    "experts kept": (
        Problem(70, 4, 2, 128, 256, 1),
        Config("G", 128, 4, block_rows=32, tile_rows=32),
        ("one expert", "uniform", "nothing"),
    ),
    # As many slots as tiles: the next expert's tiles take the places of the last visit's.
    "experts kept without room for the next": (
        Problem(70, 4, 2, 128, 256, 1),
        Config("G", 128, 2, block_rows=32, tile_rows=32, combine_tokens=32),
        ("one expert", "skewed"),
    ),
    # Three tiles in two slots, read again for each visit; visits of two tiles of rows, the last of them short.
    "experts read again": (
        Problem(70, 4, 2, 128, 384, 1, gate_up_bias=True, down_bias=True, activation=Activation("swigluoai", 1.0, 1.3)),
        Config("G", 128, 2, block_rows=64, tile_rows=32),
        ("one expert", "uniform"),
    ),
    "experts kept on two devices in rounds": (
        Problem(66, 3, 2, 128, 256, 2, down_bias=True),
        Config("G", 128, 3, block_rows=32, tile_rows=32, dispatch="push_ag", rounds=2),
        ("one expert", "duplicates"),
    ),
    # Hardly any expert has more than one row, and most have none.
    "512 experts": (
        Problem(4, 512, 10, 128, 128, 2),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("uniform",),
    ),
}
EXCHANGE = {
    "nothing divides": (
        Problem(13, 5, 4, 200, 300, 2, gate_up_bias=True, down_bias=True, activation=Activation("gelu")),
        Config("G", 128, 3, block_rows=32, tile_rows=32),
        ("uniform", "padding", "idle device", "duplicates"),
    ),
    "few tokens pushed": (
        Problem(4, 7, 1, 128, 256, 3),
        Config("G", 256, 2, block_rows=32, tile_rows=32, dispatch="push_ag"),
        ("uniform", "one device", "nothing"),
    ),
    "pushed, a round for two of three": (
        Problem(11, 8, 3, 200, 256, 3, post_norm=PostNorm(1e-3, plus_one=True)),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="push_ag", rounds=2),
        ("partial", "idle device", "one expert"),
    ),
    "pushed where wanted": (
        Problem(14, 6, 4, 256, 256, 2, post_norm=PostNorm(1e-2), gate_up_bias=True, activation=Activation("gelu_tanh")),
        Config("G", 128, 3, block_rows=32, tile_rows=32, dispatch="dedup_push"),
        ("duplicates", "one device"),
    ),
    "pushed where wanted, in rounds, summed and scattered": (
        Problem(10, 7, 2, 128, 128, 4),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="dedup_push", combine="rs", rounds=2),
        ("idle device", "padding"),
    ),
    "pushed where wanted, a round a device": (
        Problem(9, 8, 2, 128, 128, 6, combine_dtype="int8"),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="dedup_push", rounds=6),
        ("idle device", "partial"),
    ),
    "one token for eight devices": (
        Problem(1, 12, 10, 128, 128, 8),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="dedup_push", rounds=2),
        ("uniform",),
    ),
    "eight choices on three devices": (
        Problem(9, 16, 8, 128, 128, 3),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("skewed",),
    ),
    # In parts of 2, 2 and 1 of a device's five tokens.
    "summed and scattered": (
        Problem(14, 5, 2, 200, 256, 3, combine_dtype="float32"),
        Config("G", 128, 2, block_rows=32, tile_rows=32, combine="rs"),
        ("uniform",),
    ),
}
TOKENS_EVERYWHERE = {
    "summed": (
        Problem(6, 7, 2, 128, 256, 3, sequence_parallel=False),
        Config("G", 128, 2, block_rows=32, tile_rows=32, combine="rs"),
        ("partial", "idle device"),
    ),
    "8 bits back": (
        Problem(
            9,
            6,
            2,
            200,
            256,
            4,
            sequence_parallel=False,
            combine_dtype="float8_e4m3fn",
            output_gather_dtype="float8_e4m3fn",
        ),
        Config("G", 128, 3, block_rows=32, tile_rows=32),
        ("padding", "uniform"),
    ),
    "one device": (
        Problem(5, 4, 2, 128, 128, 1, sequence_parallel=False, down_bias=True),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("partial",),
    ),
}
ROWS = {
    # The weight of a row comes with its token, and an expert that a token names twice is entered once.
    "scale on input": (
        Problem(
            14, 6, 3, 200, 256, 2, scale_on_input=True, post_norm=PostNorm(1e-2), gate_up_bias=True, down_bias=True
        ),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("duplicates", "partial"),
    ),
    "scale on input, pushed in rounds, summed and scattered": (
        Problem(6, 5, 3, 128, 256, 2, scale_on_input=True),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="push_ag", combine="rs", rounds=2),
        ("duplicates", "padding"),
    ),
    # 140 own slots: the indexes of a visit begin within a row of 128 and go on in the next.
    "rows wider than 1024": (
        Problem(35, 5, 4, 1152, 128, 1),
        Config("G", 128, 2, block_rows=64, tile_rows=64),
        ("duplicates",),
    ),
    "int8 out, float8 back, pushed where wanted": (
        Problem(15, 5, 2, 200, 256, 3, dispatch_dtype="int8", combine_dtype="float8_e4m3fn"),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="dedup_push", rounds=3),
        ("padding", "idle device"),
    ),
    "float8 out, pushed in rounds": (
        Problem(12, 6, 2, 128, 256, 2, dispatch_dtype="float8_e4m3fn", scale_on_input=True),
        Config("G", 256, 2, block_rows=32, tile_rows=32, dispatch="push_ag", rounds=2),
        ("padding",),
    ),
}

# All tokens of the group in VMEM: rows are gathered by loads.
RESIDENT = {
    "pushed in rounds": (
        Problem(14, 5, 3, 200, 256, 2, dispatch_dtype="int8", scale_on_input=True),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="push_ag", rounds=2, resident=True),
        ("duplicates", "padding", "nothing"),
    ),
    "pushed where wanted": (
        Problem(13, 7, 2, 128, 256, 3, down_bias=True),
        Config("G", 128, 3, block_rows=32, tile_rows=32, dispatch="dedup_push", resident=True),
        ("uniform", "idle device"),
    ),
    "all tokens everywhere": (
        Problem(40, 4, 2, 128, 256, 2, sequence_parallel=False),
        Config("G", 128, 2, block_rows=32, tile_rows=32, resident=True),
        ("one expert",),
    ),
}
# With the kernels that make the final sum. Own rows without scales are summed in windows.
SUMMED = {
    "in windows": (
        Problem(21, 5, 3, 200, 128, 2),
        Config("G", 128, 2, block_rows=32, tile_rows=32, dispatch="push_ag"),
        ("partial", "nothing", "duplicates"),
    ),
    "in windows, all tokens everywhere": (
        Problem(9, 6, 2, 128, 128, 3, sequence_parallel=False, format="float32", dtype="float32"),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("duplicates",),
    ),
    "rows with scales": (
        Problem(9, 8, 2, 128, 128, 2, combine_dtype="int8"),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("uniform",),
    ),
    "summed and scattered": (
        Problem(40, 4, 2, 128, 128, 2),
        Config("G", 128, 2, block_rows=32, tile_rows=32, combine="rs"),
        ("uniform",),
    ),
}

# Too many rows for VMEM: the final sum reads them one by one.
STREAMED = {
    "8 bits": (
        Problem(21, 5, 3, 128, 128, 2, combine_dtype="float8_e4m3fn"),
        Config("G", 128, 2, block_rows=32, tile_rows=32),
        ("partial", "nothing"),
    ),
    "summed and scattered": (
        Problem(40, 4, 2, 128, 128, 2),
        Config("G", 128, 2, block_rows=32, tile_rows=32, combine="rs"),
        ("uniform",),
    ),
}


@pytest.mark.usefixtures("plain_sums")
@pytest.mark.parametrize("name", RING)
def test_ring_and_visits(name):
    check(*RING[name])


@pytest.mark.usefixtures("plain_sums")
@pytest.mark.parametrize("name", EXCHANGE)
def test_exchange(name):
    check(*EXCHANGE[name])


@pytest.mark.parametrize("name", TOKENS_EVERYWHERE)
def test_all_tokens_on_every_device(name):
    check(*TOKENS_EVERYWHERE[name])


@pytest.mark.usefixtures("plain_sums")
@pytest.mark.parametrize("name", ROWS)
def test_what_travels_with_a_row(name):
    check(*ROWS[name])


@pytest.mark.usefixtures("plain_sums")
@pytest.mark.parametrize("name", RESIDENT)
def test_tokens_in_vmem(name):
    check(*RESIDENT[name])


@pytest.mark.parametrize("name", SUMMED)
def test_the_final_sum(name):
    check(*SUMMED[name])


@pytest.mark.parametrize("name", STREAMED)
def test_the_final_sum_reads_rows_from_hbm(name, monkeypatch):
    monkeypatch.setattr(combine, "combine_is_resident", lambda *given: False)
    check(*STREAMED[name])
