"""An engine whose attention runs in the simulated kernel says what it says with XLA, on one device and on two."""

import logging

import numpy as np
import pytest
from cases import FIXTURES

from tpu_serve import LLM, ConfigError, SamplingParams

# A chunk and decodes meet in one step; half of the pages are shared.
COMMON = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "page_size": 8,
    "max_model_len": 64,
    "token_buckets": (16,),
    "max_num_batched_tokens": 16,
    "num_pages": 20,
    "attention_backend": "kernel",
}


@pytest.mark.parametrize(("name", "num_devices"), [("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_greedy_answers(name, num_devices):
    golden = np.load(FIXTURES / name / "golden.npz")
    llm = LLM(str(FIXTURES / name), tensor_parallel_size=num_devices, **COMMON)
    asked = (0, 1, 0)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([golden[f"prompt_{which}"].tolist() for which in asked], params)
    for which, output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == golden[f"greedy_{which}"].tolist()[:6]
    paths = llm.engine.core.runner.attention_paths()
    assert paths
    assert all(path.is_kernel for path in paths)


def test_what_the_kernel_cannot_do_is_refused_at_the_start(caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(
        ConfigError, match=r"--attention-backend kernel cannot run .* pages of 4 tokens are not a multiple of 8"
    ):
        LLM(str(FIXTURES / "qwen3_moe"), **COMMON | {"page_size": 4})
