"""The kernels for one device in `bench kernels`: which cells there are, and what is asked before anything is compiled."""

import dataclasses

import pytest

from tpu_serve.bench import kernels
from tpu_serve.bench.one_device_cells import GroupedMatmul, MoeCombine
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.grouped_matmul import cases as products
from tpu_serve.kernels.moe_combine import cases as moves


@pytest.mark.parametrize("name", ["moe_combine", "grouped_matmul"])
def test_every_operation_stands_beside_what_xla_makes_of_it(name):
    selection = kernels.Selection(kernels=(name,), chips=("v6e",), workloads=("Gemma4-26B-A4B",), tokens=(64,))
    cells = kernels.check(selection)
    operations = {"moe_combine": moves.OPERATIONS, "grouped_matmul": products.OPERATIONS}[name]
    assert [cell.case.label for cell in cells] == [
        f"{operation}-Gemma4-26B-A4B-v6e-T64-{backend}" for operation in operations for backend in ("tc", "xla")
    ]
    assert [cell.case.subject for cell in cells[::2]] == [cell.case.subject for cell in cells[1::2]]
    target, arguments = cells[1].kernel.target(cells[1].case, None)
    assert target == f"tpu_serve.bench.{name}:program"
    assert arguments == {
        "chip": "v6e", "backend": "xla", "operation": operations[0], "workload": "Gemma4-26B-A4B", "num_tokens": 64,
    }  # fmt: skip


@pytest.mark.parametrize("kernel", [MoeCombine(), GroupedMatmul()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_every_cell_has_a_config_that_fits(kernel, chip):
    """All models, from decode to prefill: none is refused, and what is chosen leaves the compiler its share of VMEM."""
    cells = list(kernel.cases(chip, tuple(WORKLOADS), None, (16, *kernel.tokens), (1,)))
    assert len(cells) == 2 * len(WORKLOADS) * len(kernel.operations) * 4
    for case in cells:
        assert kernel.refusal(case, None) is None, case.label
        config = kernel.config(case, None)
        assert (config == {}) == (case.backend == "xla")
        if config:
            assert 0 < config["vmem_bytes"] <= 0.92 * TPU_CHIPS[chip].vmem_bytes
            tiles, vmem = kernel.figures(case, config, {})
            assert tiles
            assert vmem == f"{config['vmem_bytes'] / MIB:.0f}"


def test_a_refusal_is_the_kernels_own(monkeypatch):
    kernel = MoeCombine()
    monkeypatch.setattr(moves, "problem", lambda *_: dataclasses.replace(known, top_k=129))
    known = moves.Problem(16, 8, 8, 128, 256)
    (tc, xla), *_ = [list(kernel.cases("v6e", ("Qwen3-30B-A3B",), None, (16,), (1,)))[:2]]
    assert kernel.refusal(tc, None) == "129 choices of a token are more than 128"
    assert kernel.refusal(xla, None) is None


@pytest.mark.parametrize("operation", products.OPERATIONS)
def test_bytes_of_products_are_weights_and_rows(operation):
    p = products.problem(operation, "Qwen3-30B-A3B", 100)
    matrices = 2 if operation == "gate_up" else 1
    assert products.least_bytes(p) == 2 * (128 * matrices * 2048 * 768 + 800 * (2048 + 768))


@pytest.mark.parametrize("operation", moves.OPERATIONS)
def test_bytes_of_moves_are_rows_and_tokens(operation):
    p = moves.problem(TPU_CHIPS["v6e"], operation, "GPT-OSS-120B", 100)
    assert moves.least_bytes(p) == 2 * 2944 * (400 + 100)
    assert p.num_rows % p.align == 0
