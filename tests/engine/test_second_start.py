"""A server that starts again compiles nothing: every program comes from the folder of the first start."""

from pathlib import Path

import jax

from tpu_serve.config import EngineConfig
from tpu_serve.engine import build
from tpu_serve.runner.compile_counter import num_cache_hits, num_compiled

MODEL = str(Path(__file__).parents[1] / "fixtures" / "qwen3_moe")


def test_a_second_start_finds_every_program(tmp_path):
    config = EngineConfig.from_options(
        model=MODEL,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        token_buckets=(16,),
        compile_cache_dir=str(tmp_path),
    )

    def start():
        """Programs and those of them that were found, in a process that remembers nothing."""
        jax.clear_caches()
        before = num_compiled(), num_cache_hits()
        build.build_engine(config)
        return num_compiled() - before[0], num_cache_hits() - before[1]

    try:
        first, second = start(), start()
    finally:
        build._set_up_compile_cache(EngineConfig())
    assert first[1] < first[0], "the folder was empty"
    assert second == (first[0], first[0])
