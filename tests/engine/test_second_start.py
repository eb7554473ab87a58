"""A server that starts again compiles nothing: every program comes from the folder of the first start."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax

from tpu_serve.config import EngineConfig
from tpu_serve.engine import build
from tpu_serve.engine.compiling import set_up_compile_cache
from tpu_serve.runner.compile_counter import num_cache_hits, num_compiled

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "tests" / "fixtures" / "qwen3_moe")


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
        set_up_compile_cache(EngineConfig().compile)
    assert first[1] < first[0], "the folder was empty"
    assert second == (first[0], first[0])


START = """
import json, sys
from tpu_serve.config import EngineConfig
from tpu_serve.engine.build import build_engine
from tpu_serve.runner.compile_counter import num_cache_hits, num_compiled
engine = build_engine(EngineConfig.from_options(**json.loads(sys.argv[1])))
print(num_compiled(), num_cache_hits(), engine.programs()[1])
"""


def test_what_was_compiled_elsewhere_is_found_by_the_start_of_a_server(tmp_path):
    """Other folders, another seed of hashes, no weights: only the options are the same, and two devices."""
    elsewhere, out = tmp_path / "else" / "where", tmp_path / "out"
    shutil.copytree(ROOT / "tpu_serve", elsewhere / "tpu_serve", ignore=shutil.ignore_patterns("__pycache__"))
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL) / name, model)
    options = {"tensor_parallel_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 2}

    def run(*command, where, code, seed):
        done = subprocess.run(
            [sys.executable, *command], cwd=where, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(code), "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--token-buckets", "8", "16", "--topology", "cpu", "--out", str(out), "--json"]
    command = ["-m", "tpu_serve.cli.main", "compile", str(model), *words]
    told = json.loads(run(*command, where=tmp_path, code=elsewhere, seed="1"))
    assert [one["was_there"] for one in told["programs"]] == [False] * len(told["programs"])

    options |= {"model": MODEL, "token_buckets": [8, 16], "compile_cache_dir": str(out)}
    found = run("-c", START, json.dumps(options), where=ROOT, code=ROOT, seed="2")
    num_compiled, num_found, num_programs = map(int, found.split())
    assert num_compiled == num_found == num_programs == len(told["programs"])
