"""Greedy continuations of converted checkpoints equal transformers', like those of the original."""

import numpy as np
import pytest
from cases import FIXTURES

from tpu_serve import LLM, SamplingParams
from tpu_serve.checkpoint.convert import convert_folder
from tpu_serve.checkpoint.layouts import LAYOUTS

# The sizes of another test of these models, whose compiled programs are in the cache.
OPTIONS = {
    "dtype": "float32", "max_num_seqs": 8, "page_size": 8, "max_model_len": 256, "token_buckets": (192,), "max_num_batched_tokens": 192,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_greedy_answers_of_every_layout(model, layout, tmp_path):
    convert_folder(FIXTURES / model, tmp_path / "copy", layout, max_shard_bytes=200_000)
    golden = np.load(FIXTURES / model / "golden.npz")
    llm = LLM(str(tmp_path / "copy"), **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([golden[f"prompt_{i}"].tolist() for i in range(3)], params)
    for i, output in enumerate(outputs):
        assert list(output.outputs[0].token_ids) == golden[f"greedy_{i}"].tolist()
