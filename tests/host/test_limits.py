"""What would only fail in the compiler is refused, or said to run otherwise, before anything is compiled."""

import dataclasses
import json
import logging
import runpy
from pathlib import Path

import pytest

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import MIB, TPU_CHIPS
from tpu_serve.device.mesh import make_abstract_mesh
from tpu_serve.engine.design import design_engine
from tpu_serve.engine.limits import check_limits
from tpu_serve.hf_config import read_config

PUBLISHED = runpy.run_path(str(Path(__file__).parents[1] / "models" / "published_configs.py"))["PUBLISHED"]
CHIP = TPU_CHIPS["v6e"]


@pytest.fixture
def design(tmp_path):
    """Two layers of a published model on eight v6e, its plan, and the options of both."""

    def make(**options):
        changes = {"architectures": ["AnyForCausalLM"], "num_hidden_layers": 2}
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"].config | changes))
        config = EngineConfig.from_options(
            model=str(tmp_path),
            load_format="dummy",
            tensor_parallel_size=8,
            max_model_len=4096,
            num_pages=5000,
            **options,
        )
        made = design_engine(config, read_config(tmp_path), CHIP, make_abstract_mesh(8))
        return config, made, made.plan(config)

    return make


def test_every_kernel_of_every_bucket_is_within_its_budget(design):
    config, made, plan = design()
    needs = check_limits(config, made, plan)
    for kernel in ("fused_moe_v2", "ragged_paged_attention"):
        assert {need.bucket for need in needs if need.kernel.startswith(kernel)} == set(plan.buckets)
    assert all(0 < need.vmem_bytes < CHIP.vmem_bytes and 0 < need.smem_bytes < CHIP.smem_bytes for need in needs)


def test_a_kernel_that_is_too_large_is_refused_by_name(design):
    config, made, plan = design(token_buckets=(8, 64))
    planner = made.experts.planner
    good = planner.plan(64)
    planner._plans[64] = dataclasses.replace(good, config=dataclasses.replace(good.config, ring_slots=200))
    with pytest.raises(
        ConfigError, match=r"fused kernel cannot run 64 tokens as planned .*ring_slots 200.* MiB of VMEM; v6e has"
    ):
        check_limits(config, made, plan)
    planner._plans[64] = dataclasses.replace(good, smem_bytes=3 * MIB)
    with pytest.raises(
        ConfigError, match=r"fused_moe_v2, mode D, needs 3.0 MiB of SMEM for steps of 64 tokens; v6e has 1.0 MiB"
    ):
        check_limits(config, made, plan)


def test_tiles_of_a_user_that_do_not_fit_are_passed_over_and_said_so(design, caplog):
    tiles = {"mode": "D", "tile_columns": 768, "ring_slots": 100, "compact_rows": 0}
    config, made, plan = design(moe_tiles=tiles, token_buckets=(8,))
    made.experts.planner.prepare(plan.expert_tokens)
    assert any("the tiles given by --moe-tiles are not legal here" in one.getMessage() for one in caplog.records)
    check_limits(config, made, plan)
    assert made.experts.planner.plan(8).source != "given"


def test_pages_that_the_attention_kernel_cannot_have(design, caplog):
    with caplog.at_level(logging.WARNING):
        check_limits(*design(page_size=1))
    (said,) = (one.getMessage() for one in caplog.records if "attend without the kernel" in one.getMessage())
    assert "pages of 1 tokens are not a multiple of 16" in said
    with pytest.raises(
        ConfigError, match=r"--attention-backend kernel cannot run steps of 8, .* tokens: pages of 1 tokens"
    ):
        check_limits(*design(page_size=1, attention_backend="kernel"))
    _, made, plan = design()
    copies = design(attention_backend="xla")[2].temporary_bytes - plan.temporary_bytes
    assert copies >= plan.cache_bytes, "XLA copies the cache of each of two layers"
    assert made.step_formula(plan.demand, plan.buckets).per_cache_byte == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pages": (2**24,)}, r"16777216 pages of 128 tokens has 2147483648 places, more than the 2147483647"),
        (
            {"max_num_seqs": 2**16, "max_num_batched_tokens": 2**16, "buckets": (2**16,), "max_model_len": 2**22},
            r"page tables of 65536 sequences of 32768 pages, has \d+ numbers, .* Lower --max-num-seqs",
        ),
    ],
)
def test_what_32_bits_do_not_count(design, changes, words):
    config, made, plan = design()
    with pytest.raises(ConfigError, match=words):
        check_limits(config, made, dataclasses.replace(plan, **changes))
