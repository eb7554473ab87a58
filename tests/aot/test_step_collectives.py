"""What the devices of a TPU slice send one another in a whole step, and what each copies, as libtpu compiles it."""

import json
from collections import Counter

import pytest

from tpu_serve.bench.compiled.collectives import collectives, copies
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import chip_of
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.design import design_engine
from tpu_serve.engine.programs import make_programs
from tpu_serve.hf_config import read_config
from tpu_serve.runner.programs import Allowed

pytestmark = pytest.mark.aot

# Four KV heads on eight devices, a vocabulary and an inner size that nothing divides, and layers of either kind.
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 1024, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 704,
    "intermediate_size": 2111, "mlp_only_layers": [1], "vocab_size": 32771, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "norm_topk_prob": True, "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
TOKENS, ROWS, LARGE = 64, 32, 1 << 20


@pytest.mark.parametrize(("chip", "backend"), [("v6e", "ragged"), ("tpu7x", "fused")])
def test_nothing_is_sent_but_sums_and_what_the_sampler_agrees_on(tmp_path, chip, backend):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig.from_options(
        model=str(tmp_path), load_format="dummy", tensor_parallel_size=8, num_pages=300, token_buckets=(TOKENS,), max_num_seqs=ROWS,
        max_num_batched_tokens=TOKENS, moe_backend=backend,
    )  # fmt: skip
    devices = target_devices(topology(chip, 8))
    design = design_engine(config, read_config(tmp_path), chip_of(devices[0]), make_mesh(devices))
    programs = make_programs(config, design, design.plan(config), Allowed(CONFIG["vocab_size"]))
    text = programs.lower(TOKENS).compile().as_text()
    found = collectives(text)
    listed = list(map(str, found))
    sampling = [one for one in found if one.scope.startswith(("sampler", "prompt_logprobs"))]
    sums = Counter(one.scope.split("/")[0] for one in found if one not in sampling)
    in_experts = {"experts": 1} if backend == "ragged" else {}  # the kernel brings its own
    assert sums == {"embedding": 1, "attention": 2, "mlp": 1, **in_experts}, listed
    for one in found:
        if one not in sampling:
            assert (one.operation, one.arrays) == ("all-reduce", (f"bf16[{TOKENS},{CONFIG['hidden_size']}]",)), str(one)
            assert (one.num_devices, one.always_runs) == (8, True), str(one)
            assert one.is_asynchronous == (chip == "tpu7x"), str(one)  # where there are SparseCores that do it
    for one in sampling:
        assert one.operation in ("all-reduce", "all-gather"), str(one)
        assert one.num_bytes <= 8 * 20 * 4 * max(TOKENS, ROWS), str(one)
    assert sum(one.always_runs for one in sampling) == 3, listed
    assert list(map(str, copies(text, LARGE))) == []
