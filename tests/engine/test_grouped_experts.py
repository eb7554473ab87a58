"""An engine whose experts are computed by the grouped backend says what every other engine says, whatever moves and multiplies the rows."""

import numpy as np
import pytest
from cases import FIXTURES

from tpu_serve import LLM, SamplingParams

COMMON = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "page_size": 8,
    "max_model_len": 256,
    "token_buckets": (16,),
    "max_num_batched_tokens": 16,
    "num_pages": 34,
    "enable_prefix_caching": False,
}


def engine(name, num_devices=1, **options):
    return LLM(
        str(FIXTURES / name), tensor_parallel_size=num_devices, **COMMON, **{"moe_backend": "grouped", **options}
    )


@pytest.mark.parametrize(
    ("name", "permute", "combine", "num_devices"),
    [
        ("qwen3_moe", "xla", "xla", 1),
        ("qwen3_moe", "onehot", "xla", 2),
        ("mixtral", "onehot", "onehot", 1),
        ("mixtral", "auto", "auto", 4),
    ],
)
def test_greedy_answers_are_the_golden_ones(name, permute, combine, num_devices):
    golden = np.load(FIXTURES / name / "golden.npz")
    llm = engine(name, num_devices, moe_permute=permute, moe_combine=combine)
    runner, before = llm.engine.core.runner, llm.engine.core.runner.compile_count
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    outputs = llm.generate(prompts * 2, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for index, output in enumerate(outputs):
        assert list(output.outputs[0].token_ids) == golden[f"greedy_{index % 3}"].tolist()
    assert runner.compile_count == before


@pytest.mark.parametrize(("name", "num_devices"), [("qwen3_moe", 2)])
def test_greedy_answers_with_the_kernels(name, num_devices):
    """The kernels in simulation, prompts in chunks: the answers of one device with XLA, token for token."""
    golden = np.load(FIXTURES / name / "golden.npz")
    llm = engine(name, num_devices, moe_permute="tc", moe_combine="tc", moe_grouped_matmul="tc")
    prompts = [golden[f"prompt_{i}"].tolist()[:18] for i in range(1)]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    plain = engine(name, moe_backend="ragged").generate(prompts, params)
    for output, expected in zip(llm.generate(prompts, params), plain, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
