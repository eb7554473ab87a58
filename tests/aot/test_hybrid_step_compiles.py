"""The step of a model with recurrent layers, as libtpu compiles it: states and last inputs stay where they lie, and nothing has their size."""

import json
import math
import re

import jax
import pytest

from tpu_serve.bench.compiled.collectives import collectives, copies
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import MIB, chip_of
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.design import design_engine
from tpu_serve.engine.programs import make_programs
from tpu_serve.hf_config import read_config
from tpu_serve.runner.programs import Allowed

pytestmark = pytest.mark.aot

# One recurrent layer and one with attention.
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2,
    "hidden_size": 512, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "intermediate_size": 512,
    "vocab_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "partial_rotary_factor": 0.25,
    "norm_topk_prob": True, "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
TOKENS, ROWS = 64, 64


def test_nothing_has_the_size_of_the_states(tmp_path):
    num_devices = 4
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig.from_options(
        model=str(tmp_path), load_format="dummy", tensor_parallel_size=num_devices, num_pages=300, token_buckets=(TOKENS,),
        max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, moe_backend="ragged",
    )  # fmt: skip
    devices = target_devices(topology("v6e", num_devices))
    design = design_engine(config, read_config(tmp_path), chip_of(devices[0]), make_mesh(devices))
    programs = make_programs(config, design, design.plan(config), Allowed(CONFIG["vocab_size"]))
    (pool,) = [x for x in jax.tree.leaves(programs.state) if x.ndim == 4 and x.dtype == "float32"]
    pool_bytes = math.prod(pool.shape) * 4 // num_devices
    compiled = programs.lower(TOKENS).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert len(re.findall(r"%gated_delta_rule[\w.]* = ", text)) == 1
    assert memory.alias_size_in_bytes > pool_bytes > 32 * MIB
    assert memory.temp_size_in_bytes < pool_bytes / 4
    assert [str(one) for one in copies(text, 4 * MIB)] == []
    in_layer = [one for one in collectives(text) if one.scope.startswith("delta_net")]
    assert [(one.operation, one.arrays) for one in in_layer] == [("all-reduce", (f"bf16[{TOKENS},512]",))], (
        "only the output's"
    )
