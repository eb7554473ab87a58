"""What computes combine and permute: what the kernels refuse and why, fallbacks, configs that fit, and VMEM that is counted."""

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.device.chip import MIB, TPU_CHIPS, cpu_chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.moe_combine import gather, op
from tpu_serve.kernels.moe_combine.cases import OPERATIONS, problem
from tpu_serve.kernels.moe_combine.problem import (
    BYTES,
    MAX_TOP_K,
    VMEM_SHARE,
    Config,
    Problem,
    buffer_rows,
    buffers,
    configs,
    granule,
    heuristic,
    num_panels,
    supported,
    vmem_bytes,
)

V6E = TPU_CHIPS["v6e"]
GOOD = Problem(512, 4, 16, 2048, 256, "bfloat16", "float32", 8)


def test_a_good_problem_is_supported_for_everything():
    for chip in TPU_CHIPS.values():
        for operation in OPERATIONS:
            good = dataclasses.replace(GOOD, align=granule("bfloat16", chip))
            assert supported(good, chip, operation) is None


@pytest.mark.parametrize(
    ("changes", "operation", "numbers"),
    [
        ({"dtype": "float16"}, "combine", ["float16", "bfloat16"]),
        ({"dtype": "int8", "align": 32}, "combine", ["int8", "moved but not summed"]),
        ({"dtype": "float8_e4m3fn", "align": 32}, "dots", ["float8_e4m3fn", "moved but not summed"]),
        ({"weight_dtype": "float16"}, "combine", ["float16", "bfloat16 or float32"]),
        ({"out_dtype": "float16"}, "combine", ["float16"]),
        ({"num_tokens": 0}, "combine", ["at least 1"]),
        ({"hidden": 200}, "combine", ["200", "128"]),
        ({"num_rows": 2044}, "permute", ["2044", "multiple of 8"]),
        ({"top_k": MAX_TOP_K + 1, "num_rows": 512 * 136}, "combine", [str(MAX_TOP_K + 1), str(MAX_TOP_K)]),
        ({"num_rows": 2**24 + 8}, "combine", [str(2**24 + 8), str(2**24)]),
        ({"align": 1, "row_lanes": 1}, "combine", ["256"]),
        ({"align": 1, "row_lanes": 2}, "permute", ["summed only"]),
    ],
)
def test_a_refusal_names_what_is_too_much_and_the_limit(changes, operation, numbers):
    reason = supported(dataclasses.replace(GOOD, **changes), V6E, operation)
    assert reason is not None
    assert [number for number in numbers if number not in reason] == []


def test_too_much_vmem_is_refused_with_both_numbers():
    small = dataclasses.replace(V6E, name="small", vmem_bytes=2 * MIB)
    reason = supported(GOOD, small, "combine")
    need = vmem_bytes(GOOD, Config(128, 128), "combine")
    assert f"{need / MIB:.1f} MiB of VMEM" in reason
    assert f"small has {int(VMEM_SHARE * 2 * MIB) / MIB:.1f} MiB" in reason
    with pytest.raises(ValueError, match="MiB of VMEM"):
        heuristic(GOOD, small, "combine")


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_configs_of_real_layers_fit_and_cover_every_column(chip, operation):
    for workload in ("Qwen3-30B-A3B", "Qwen3.5-397B-A17B", "GPT-OSS-120B"):
        for num_tokens in (300, 16384):
            p = problem(TPU_CHIPS[chip], operation, workload, num_tokens)
            found = list(configs(p, TPU_CHIPS[chip], operation))
            assert heuristic(p, TPU_CHIPS[chip], operation) in found
            for config in found:
                panels = num_panels(p, config)
                assert (panels - 1) * config.panel < p.hidden <= panels * config.panel
                assert config.panel % 128 == config.block_tokens % 128 == 0
                assert buffer_rows(p, config) >= config.block_tokens * p.top_k
                assert vmem_bytes(p, config, operation) <= VMEM_SHARE * TPU_CHIPS[chip].vmem_bytes


def test_rows_for_themselves_come_in_one_panel():
    p = dataclasses.replace(GOOD, hidden=640, align=1, row_lanes=8)
    assert {config.panel for config in configs(p, V6E, "combine")} == {640}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_vmem_counts_what_is_allocated(operation):
    """The scratch is made of `buffers`, and the count exceeds it by the windows and values of a product."""
    for config in (Config(128, 128), Config(256, 256)):
        held = buffers(GOOD, config, operation)
        allocated = sum(math.prod(shape) * BYTES[dtype] for shape, dtype in held.values())
        scratch = gather.scratch_of(GOOD, config, operation)
        made = {name: (ref.shape, jnp.dtype(ref.dtype).name) for name, ref in scratch.items() if name in held}
        assert made == held
        tokens = config.block_tokens * config.panel * BYTES[GOOD.dtype]
        assert vmem_bytes(GOOD, config, operation) >= allocated + 2 * tokens


AUTO = [
    # chip, tokens, wanted
    ("v6e", 16, "onehot"),
    ("v6e", op.ONE_HOT_TOKENS, "onehot"),
    ("v6e", op.ONE_HOT_TOKENS + 1, "tc"),
    ("tpu7x", 4096, "tc"),
    ("cpu", 16, "xla"),
    ("cpu", 4096, "xla"),
]


@pytest.mark.parametrize(("chip", "num_tokens", "wanted"), AUTO)
def test_auto(chip, num_tokens, wanted, caplog):
    """By chip and tokens, without a word: nobody asked for the kernel."""
    chip = cpu_chip() if chip == "cpu" else TPU_CHIPS[chip]
    p = Problem(num_tokens, 4, 16, 4 * num_tokens + -4 * num_tokens % 16, 256, "bfloat16", "float32", 16)
    before = dict(op.fallbacks)
    assert op.choose(p, op.Choice("auto", Context(chip), 16), "combine") == wanted
    assert op.fallbacks == before
    assert not caplog.records


def test_auto_takes_xla_where_the_kernel_refuses_and_says_why(monkeypatch, caplog):
    monkeypatch.setattr(op, "fallbacks", type(op.fallbacks)())
    p = dataclasses.replace(GOOD, num_rows=2044)
    with caplog.at_level(logging.WARNING):
        assert op.choose(p, op.Choice("auto", Context(V6E), 16), "combine") == "xla"
    assert "2044 rows are not a multiple of 8" in caplog.text
    assert sum(op.fallbacks.values()) == 1


@pytest.mark.parametrize("backend", ["onehot", "xla"])
def test_what_is_named_is_taken(backend):
    assert op.choose(GOOD, op.Choice(backend, Context(V6E), 16), "permute") == backend


def test_a_fallback_is_logged_once_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(op, "fallbacks", type(op.fallbacks)())
    choice = op.Choice("tc", Context(V6E), 16)
    assert op.choose(GOOD, choice, "combine") == "tc"
    assert not op.fallbacks
    refused = dataclasses.replace(GOOD, top_k=200, num_rows=512 * 200)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert op.choose(refused, choice, "combine") == "xla"
        assert op.choose(refused, choice, "permute") == "xla"
    reason = supported(refused, V6E, "combine")
    assert op.fallbacks == {("combine", reason): 3, ("permute", reason): 1}
    assert [reason in record.message for record in caplog.records] == [True, True]


def test_a_cpu_does_not_compile_the_kernel_and_xla_answers(monkeypatch, caplog):
    """A call that falls back is right: permute, then combine with weights that add up to one, is the identity."""
    monkeypatch.setattr(op, "fallbacks", type(op.fallbacks)())
    choice = op.Choice("tc", Context(cpu_chip()), 5)
    tokens = np.random.default_rng(0).normal(size=(20, 100)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 5, (20, 2)).astype(np.int32)

    def both(tokens, ids):
        return op.combine(op.permute(tokens, ids, choice, 43), ids, jnp.full(ids.shape, 0.5), choice)

    np.testing.assert_array_equal(jax.jit(both)(tokens, ids), tokens)
    assert {operation for operation, _ in op.fallbacks} == {"combine", "permute"}
    assert all("cpu can only simulate it" in reason for _, reason in op.fallbacks)
    assert len(caplog.records) == 2
