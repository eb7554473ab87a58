"""Kernels for one device through `bench kernels --compiled`: what is exact in a report is asserted."""

import pytest

from tpu_serve.bench.compiled.report import report
from tpu_serve.bench.grouped_matmul import uniform_sizes
from tpu_serve.bench.one_device_cells import GroupedMatmul, MoeCombine, Subject
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.grouped_matmul import cases as products

pytestmark = pytest.mark.aot


def found(kernel, subject, chip="v6e"):
    case = next(
        case
        for case in kernel.cases(chip, (subject.workload,), None, (subject.num_tokens,), (1,))
        if case.problem == subject and case.backend == "tc"
    )
    made = report(*kernel.target(case, None), chip, 1, 250)
    assert made["error"] is None
    return made, made["kernels"][made["main_kernel"]]


def test_grouped_products_read_each_weight_once():
    made, main = found(GroupedMatmul(), Subject("down", "Qwen3-30B-A3B", 256))
    p = products.problem("down", "Qwen3-30B-A3B", 256)
    assert uniform_sizes(p).sum() == p.rows
    assert made["main_kernel"].startswith("grouped_forward")
    # Rows come once, though several groups meet a tile of them.
    assert main["hbm_bytes"] == pytest.approx(products.least_bytes(p), rel=0.03)
    assert main["failed_checks"] == {}
    assert made["temporary_bytes"] < 2**20


def test_combine_reads_rows_in_windows():
    made, main = found(MoeCombine(), Subject("combine", "Qwen3-30B-A3B", 512))
    rows, tokens = 512 * 8 * 2048 * 2, 512 * 2048 * 2
    assert made["main_kernel"].startswith("moe_combine_gather")
    # Every row once, and at most 7 beside them at either end of 128 windows a block.
    assert rows + tokens <= main["hbm_bytes"] <= 2.2 * (rows + tokens)
    assert made["temporary_bytes"] < 2**20
    assert TPU_CHIPS["v6e"].vmem_bytes >= main["vmem_bytes"] > 0
