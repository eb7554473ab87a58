"""The memory plan against what libtpu says of a whole step."""

import dataclasses
import json

import pytest

from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import MIB, chip_of
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.compiled_memory import ProgramBytes
from tpu_serve.engine.design import design_engine
from tpu_serve.engine.programs import make_programs
from tpu_serve.engine.sizing import budget_of, settled
from tpu_serve.hf_config import read_config
from tpu_serve.runner.programs import Allowed

pytestmark = pytest.mark.aot

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 512, "head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "intermediate_size": 512, "vocab_size": 32768, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": True,
    "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize(("changes", "stored", "backend"), [({}, "auto", "ragged"), (DENSE, "fp8", "auto")])
def test_the_calculated_plan_holds_what_the_compiler_needs(tmp_path, changes, stored, backend):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    config = EngineConfig.from_options(
        model=str(tmp_path), load_format="dummy", tensor_parallel_size=4, num_pages=40_000, token_buckets=(32,), max_num_seqs=32,
        kv_cache_dtype=stored, moe_backend=backend,
    )  # fmt: skip
    devices = target_devices(topology("v6e", 4))
    design = design_engine(config, read_config(tmp_path), chip_of(devices[0]), make_mesh(devices))
    plan = design.plan(config)
    budget = budget_of(config, design, plan)
    programs = make_programs(config, design, plan, Allowed(CONFIG["vocab_size"]))
    compiled = programs.lower(32).compile()
    told = ProgramBytes.of(compiled)
    arguments = budget.weights + budget.sampler + plan.cache_bytes
    assert arguments <= told.argument <= 1.01 * arguments + MIB, "no array is padded, unless the plan counts it so"
    assert told.alias >= budget.sampler + plan.cache_bytes, "the state is given back where it lay"
    needed = told.running + told.code
    calculated = arguments + plan.temporary_bytes + plan.code_bytes
    assert needed <= calculated <= 1.1 * needed
    done = settled(config, design, plan, lambda plan: compiled)
    assert (done.figures, done.num_pages) == ("compiled", plan.num_pages)
    assert budget.left(done) == budget.usable - needed
    assert dataclasses.replace(done, temporary_bytes=0, code_bytes=0, figures="") == dataclasses.replace(
        plan, temporary_bytes=0, code_bytes=0, figures=""
    )
