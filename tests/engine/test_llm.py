"""Offline generation with the embedded model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from docs_blocks import blocks

import tpu_serve
from tpu_serve import LLM, ConfigError, InvalidRequest, SamplingParams
from tpu_serve.config import EngineConfig
from tpu_serve.engine import build
from tpu_serve.engine.compiling import set_up_compile_cache
from tpu_serve.moe_plan import planner
from tpu_serve.moe_plan.portable import PORTABLE

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(scope="module")
def llm():
    return LLM(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, token_buckets=(64,))


def idle(llm):
    llm.engine.core.scheduler.check()
    return not llm.engine.core.scheduler.has_work and llm.engine.core.scheduler.cache.usage == 0


def test_chat_answers_with_language(llm):
    (output,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt.endswith("<|im_start|>assistant\n")


def test_no_plan_is_made_inside_a_step(llm, monkeypatch):
    """How experts run is decided for every token bucket when the engine is built."""
    assert sum(llm.engine.moe_plans.values()) == 1
    ((path, source),) = llm.engine.moe_plans
    assert path in PORTABLE
    assert source == "none"

    def no_more(*_):
        raise AssertionError("a plan was made while the engine ran")

    monkeypatch.setattr(planner, "plan_layer", no_more)
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4


def test_the_offline_examples_of_the_documentation(llm, monkeypatch, capsys):
    monkeypatch.setattr(tpu_serve, "LLM", lambda: llm)
    examples = [block for block in blocks() if block.language == "python" and not block.needs_server]
    for block in examples:
        exec(compile(block.text, block.page.name, "exec"), {})
    assert "Paris" in capsys.readouterr().out
    assert idle(llm)


def test_several_conversations_and_template_arguments(llm):
    conversations = [
        [{"role": "user", "content": f"What is the capital of {country}?"}] for country in ("Italy", "Spain")
    ]
    outputs = llm.chat(conversations, GREEDY)
    assert [re.sub(r".* is ", "", output.outputs[0].text) for output in outputs] == ["Rome.", "Madrid."]
    (output,) = llm.chat(conversations[0], GREEDY, enable_thinking=False)
    assert output.prompt == outputs[0].prompt + "<think>\n\n</think>\n\n"


def test_prompts_in_every_form_and_params_per_prompt(llm):
    ids = llm.tokenizer.encode("Once upon a time")
    by_text, by_ids = llm.generate(["Once upon a time", ids], [GREEDY, SamplingParams(temperature=0, max_tokens=5)])
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == tuple(ids)
    assert by_text.outputs[0].token_ids[:5] == by_ids.outputs[0].token_ids
    assert llm.generate("Once upon a time", GREEDY)[0].outputs == by_text.outputs
    assert llm.generate(ids, GREEDY)[0].outputs == by_text.outputs
    assert llm.generate(np.array(ids), GREEDY)[0].outputs == by_text.outputs
    assert llm.generate([], GREEDY) == []


def test_a_stop_string_ends_the_answer_and_frees_the_engine(llm):
    whole = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
    cut = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=30, stop=["named"]))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index("named")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "named")
    assert len(cut.token_ids) < len(whole.token_ids)
    assert idle(llm)


def test_model_defaults_and_seeds(llm):
    assert llm.default_params().temperature == 0.6
    assert llm.default_params().top_k == 20
    one, other = (
        llm.generate("Once upon a time", SamplingParams(seed=3, temperature=1.5, max_tokens=20, n=2))[0]
        for _ in range(2)
    )
    assert one.outputs == other.outputs
    assert one.outputs[0] != one.outputs[1]


def test_errors_name_the_field_and_leave_nothing_behind(llm):
    with pytest.raises(InvalidRequest, match="maximum context length is 256"):
        llm.generate(["fine", [3] * 256], GREEDY)
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        llm.generate([[5000]], GREEDY)
    with pytest.raises(InvalidRequest, match="must be integers"):
        llm.generate([[3, 1.5]], GREEDY)
    with pytest.raises(InvalidRequest, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "user"}], GREEDY)
    assert idle(llm)
    assert len(llm.generate("a", GREEDY)) == 1


@pytest.mark.parametrize("place", ["before the launch", "after the launch", "before the collection", "after it"])
def test_an_interrupt_leaves_nothing_behind(llm, monkeypatch, place):
    """A signal arrives where time is spent: pages are promised but not written, the device state is consumed, a step is never committed."""
    runner = llm.engine.core.runner
    name = "launch" if "launch" in place else "collect"
    real, calls = getattr(runner, name), []
    prompts = ["Once upon a time there was", "Once"]
    expected = [output.outputs for output in llm.generate(prompts, GREEDY)]
    llm.engine.core.scheduler.cache.reset()

    def interrupted(step):
        calls.append(1)
        if len(calls) < 3:
            return real(step)
        if place == "after the launch":  # between the call of the program and the assignment of what it returned
            state = runner._state
            real(step)
            runner._state = state
        if place == "after it":
            real(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY)
    monkeypatch.undo()
    assert idle(llm)
    for _ in range(2):
        assert [output.outputs for output in llm.generate(prompts, GREEDY)] == expected
    assert idle(llm)


def test_unknown_and_impossible_options():
    with pytest.raises(ConfigError, match=r"Unknown option 'max_model_length'\. Did you mean 'max_model_len'"):
        LLM(max_model_length=5)
    with pytest.raises(ConfigError, match="more than the model's own limit of 2048"):
        LLM(max_model_len=4096)
    with pytest.raises(ConfigError, match="There is no folder '/does/not/exist'"):
        LLM("/does/not/exist")


def test_dummy_weights_need_no_file(tmp_path):
    source = ROOT / "tests" / "fixtures" / "qwen3_moe"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    options = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 2,
        "token_buckets": (16,),
        "load_format": "dummy",
        "hf_overrides": {"num_hidden_layers": 1},
    }
    first, again = (LLM(str(tmp_path), **options).generate("hello", GREEDY) for _ in range(2))
    assert first == again
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"architectures": None}, "architectures is null"),
        ("config.json", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ("config.json", {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ("config.json", {"head_dim": 15}, "15 dimensions of a head of 15 cannot be rotated in pairs"),
        ("config.json", {"num_hidden_layers": "3"}, "num_hidden_layers must be an integer"),
        ("config.json", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ("config.json", {"num_attention_heads": -1}, "num_attention_heads must be at least 1"),
        ("config.json", {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ("config.json", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor in \(0, 1\]"),
        ("config.json", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ("config.json", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ("generation_config.json", {"temperature": 5}, "temperature must be in"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id must be an integer"),
    ],
)
def test_broken_descriptions_are_refused_before_weights_are_read(tmp_path, monkeypatch, file, changes, words):
    source = ROOT / "tests" / "fixtures" / "qwen3_moe"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | changes))
    monkeypatch.setattr(build, "load_params", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match=words):
        LLM(str(tmp_path))


def test_each_engine_keeps_programs_where_its_own_option_says(tmp_path):
    def compile_something(size, **options):
        set_up_compile_cache(EngineConfig.from_options(**options).compile)
        jax.jit(lambda x: x * 3 + size)(np.ones(size)).block_until_ready()

    try:
        compile_something(5, compile_cache_dir=str(tmp_path / "a"))
        assert list((tmp_path / "a").iterdir())
        compile_something(6, compile_cache_dir=str(tmp_path / "b"))
        assert list((tmp_path / "b").iterdir())
        before = set(tmp_path.rglob("*"))
        compile_something(7, compile_cache_dir="off")
        assert set(tmp_path.rglob("*")) == before
    finally:
        set_up_compile_cache(EngineConfig().compile)


def test_layers_can_be_cut_from_a_checkpoint():
    source = str(ROOT / "tests" / "fixtures" / "qwen3_moe")
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "token_buckets": (16,)}
    cut = LLM(source, hf_overrides={"num_hidden_layers": 1}, **options)
    assert len(cut.engine.core.runner.params["layers"]) == 1
    assert cut.generate("hello", GREEDY)
    with pytest.raises(ConfigError, match="lacks weights"):
        LLM(source, hf_overrides={"num_hidden_layers": 4}, **options)


def test_importing_the_package_imports_no_jax():
    code = "import sys, tpu_serve; tpu_serve.SamplingParams(); assert 'jax' not in sys.modules; print(tpu_serve.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == __import__("tpu_serve").__version__
