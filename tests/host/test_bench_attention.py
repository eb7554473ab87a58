"""The attention kernel in `bench kernels`: which cells there are, and what their bound is calculated from."""

import pytest

from tpu_serve.bench import kernels
from tpu_serve.bench.attention_cells import RaggedPagedAttention
from tpu_serve.bench.models.step import Step
from tpu_serve.bench.ragged_paged_attention import least, problem
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.ragged_paged_attention.cases import LAYERS


def test_few_tokens_are_decodes_and_many_a_prompt():
    selection = kernels.Selection(
        kernels=("ragged_paged_attention",), chips=("v6e",), workloads=("Qwen3-30B-A3B",), formats=("int8",),
        device_counts=(4,),
    )  # fmt: skip
    cells = kernels.check(selection)
    assert [cell.case.label for cell in cells] == [
        "decode-Qwen3-30B-A3B-of4-int8-v6e-T64-tc", "prefill-Qwen3-30B-A3B-of4-int8-v6e-T2048-tc",
    ]  # fmt: skip
    _, asked = cells[0].kernel.target(cells[0].case, None)
    assert asked == {
        "chip": "v6e", "phase": "decode", "workload": "Qwen3-30B-A3B", "num_devices": 4, "num_tokens": 64, "stored": "int8",
    }  # fmt: skip


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_every_cell_has_a_config_that_fits(chip):
    kernel = RaggedPagedAttention()
    for case in kernel.cases(chip, tuple(LAYERS), None, kernel.tokens, kernel.known_device_counts):
        assert kernel.refusal(case, None) is None, case.label
        config = kernel.config(case, None)
        assert 0 < config["vmem_bytes"] <= 0.9 * TPU_CHIPS[chip].vmem_bytes
        assert all(kernel.figures(case, config, {}))


def test_the_bound_counts_what_is_seen():
    """Qwen3-30B-A3B on one of 4 devices: 8 heads over one KV head of size 128."""
    decode, prompt = Step.of("decode", 64), Step.of("prefill", 2048)
    found = least(problem("Qwen3-30B-A3B", 4, decode), decode)
    assert found["hbm_bytes"] == 2 * (2 * 64 * 8 * 128 + 64 * 2049 * 256)
    assert least(problem("Qwen3-30B-A3B", 4, prompt), prompt)["flops"] == 4 * 8 * 128 * 2048 * 2049 // 2
    windowed = least(problem("GPT-OSS-120B local", 8, decode), decode)
    assert windowed["hbm_bytes"] == 2 * (2 * 64 * 8 * 64 + 64 * 129 * 128)
