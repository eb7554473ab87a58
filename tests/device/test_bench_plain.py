"""`bench plain`: its loop writes what the model says, and the command compares it with an engine."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FIXTURES
from golden_models import backend_for, forward, load_fixture

from tpu_serve.bench.plain import DenseMixing, Plain, cells
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import cpu_chip
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.design import design_engine
from tpu_serve.hf_config import read_config


def design_of(name, dtype="float32", num_devices=1):
    config = EngineConfig.from_options(model=str(FIXTURES / name), dtype=dtype)
    mesh = make_mesh(jax.devices()[:num_devices])
    return design_engine(config, read_config(FIXTURES / name), cpu_chip(), mesh)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3"])  # the second one has windows
def test_answers_are_greedy(name):
    model, params, _ = load_fixture(name)
    prompts = np.random.default_rng(0).integers(0, 200, (2, 21))
    answers, first_seconds, step_seconds = Plain(design_of(name), params).run(prompts, 5)
    assert answers.shape == (2, 5)
    assert first_seconds > 0
    assert step_seconds > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        _, logits = forward(model, params, np.concatenate([prompt, answer]), backend_for(model, "dense"))
        np.testing.assert_array_equal(np.argmax(logits[len(prompt) - 1 : -1], axis=-1), answer)


def test_in_bfloat16_the_cache_holds_bits():
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(6, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2))
    outs = []
    for dtype in (jnp.bfloat16, jnp.uint16):
        cache = tuple(jnp.zeros((2, 5, 2, 8), dtype) for _ in range(2))
        out, (keys, _) = DenseMixing(2, jnp.int32(1)).attend(q, k, v, cache, scale=0.3)
        assert keys.dtype == dtype
        outs.append(np.asarray(out, np.float32))
    np.testing.assert_array_equal(*outs)
    assert np.abs(outs[0]).max() > 0.1


def test_what_it_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="this model has recurrent layers"):
        Plain(design_of("qwen3_next"), None)
    with pytest.raises(ConfigError, match="runs on one device"):
        Plain(design_of("qwen3_moe", num_devices=2), None)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "plain.json"
    words = [
        "--input-len",
        "8",
        "--batch-size",
        "2",
        "--output-len",
        "5",
        "--num-iters",
        "1",
        "--num-iters-warmup",
        "0",
    ]
    sizes = ["--dtype", "float32", "--max-model-len", "32", "--max-num-batched-tokens", "16", "--token-buckets", "16"]
    model = ["--model", str(FIXTURES / "qwen3_moe"), "--output-json", str(file)]
    assert main(["bench", "plain", *words, *sizes, *model]) == 0
    (one,) = json.loads(file.read_text())["results"]
    assert " ".join(cells(one)) in " ".join(capsys.readouterr().out.split())
    assert all(one[f"{who}_{part}_ms"] > 0 for who in ("engine", "plain") for part in ("prefill", "step"))


def test_a_ratio_is_of_the_engine_to_the_loop():
    times = {"engine_prefill_ms": 30.0, "plain_prefill_ms": 20.0, "engine_step_ms": 5.0, "plain_step_ms": 4.0}
    shown = cells({"batch_size": 2, "input_len": 8, "output_len": 9, **times})
    assert shown == ["2", "8", "9", "30.00", "20.00", "1.50", "5.00", "4.00", "1.25", "400.0"]
