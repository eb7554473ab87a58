"""An engine starts without waiting: programs are compiled beside the weights, and steps grow as programs come."""

import logging
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import cpu_chip
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine import build, compiling
from tpu_serve.engine.client import EngineClient
from tpu_serve.engine.design import design_engine
from tpu_serve.hf_config import read_config
from tpu_serve.llm import LLM
from tpu_serve.request import FinishReason, SamplingParams
from tpu_serve.runner import background
from tpu_serve.runner.compilation import Made
from tpu_serve.runner.programs import Allowed
from tpu_serve.runner.recompiles import Recompiled, Recompiles

MODEL = str(Path(__file__).parents[1] / "fixtures" / "qwen3_moe")
SMALL = {
    "model": MODEL, "max_num_batched_tokens": 32, "max_num_seqs": 16, "token_buckets": (8, 32), "num_pages": 64,
    "on_recompile": "count",
}  # fmt: skip
LARGEST = "step of 32 tokens"
PROMPTS = [[1 + (7 * i + j) % 90 for j in range(3 + i % 3)] for i in range(12)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Gate:
    """Holds one program back until it is opened, or makes it fail."""

    def __init__(self, monkeypatch, name=LARGEST):
        self.open, self.error, self.asked = threading.Event(), None, threading.Event()
        compiler = compiling._compiler

        def gated(config, design):
            compile = compiler(config, design)

            def wait_and_compile(program):
                if program.name == name:
                    self.asked.set()
                    assert self.open.wait(60)
                    if self.error is not None:
                        raise self.error
                return compile(program)

            return wait_and_compile

        monkeypatch.setattr(compiling, "_compiler", gated)


@pytest.fixture
def gate(monkeypatch):
    held = Gate(monkeypatch)
    yield held
    held.open.set()
    background._join()


@pytest.fixture(scope="module")
def whole():
    """An engine that waited for all programs."""
    return LLM(**SMALL)


def answers(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_steps_grow_when_their_program_is_there(gate, whole):
    llm = LLM(serve_while_compiling=True, **SMALL)
    core, sizes = llm.engine.core, []
    core.on_step = lambda output, seconds: sizes.append((output.num_tokens, len(output.scheduled)))
    num_ready, num_programs = llm.engine.programs()
    assert num_ready == num_programs - 1
    expected = answers(whole)

    assert answers(llm) == expected
    assert max(tokens for tokens, _ in sizes) == 8
    assert max(rows for _, rows in sizes) == 8, "all rows of the small bucket are used"

    before = core.runner.compile_count
    gate.open.set()
    core.runner.compilation.wait([LARGEST])
    sizes.clear()
    assert answers(llm) == expected
    assert max(tokens for tokens, _ in sizes) > 8
    assert max(rows for _, rows in sizes) == len(PROMPTS)
    assert llm.engine.programs() == (num_programs, num_programs)
    assert core.runner.compile_count == before + 1
    assert llm.engine.num_recompiled() == 0


def test_a_program_that_fails_later_ends_the_engine_though_it_is_idle(gate):
    engine = build.build_engine(EngineConfig.from_options(serve_while_compiling=True, **SMALL))
    failed = threading.Event()
    client = EngineClient(engine.core, lambda outputs: None, lambda why: failed.set())
    gate.error = RuntimeError("no room")
    gate.open.set()
    assert failed.wait(60)
    assert client.failure == "the engine failed: RuntimeError"
    client.close()


def test_weights_that_do_not_fit_end_a_start_before_its_programs_are_done(gate, monkeypatch):
    def refuse(*arguments, **options):
        assert gate.asked.wait(60), "programs are begun before weights are read"
        raise ConfigError("a tensor is missing")

    monkeypatch.setattr(build, "load_params", refuse)
    with pytest.raises(ConfigError, match="a tensor is missing"):
        build.build_engine(EngineConfig.from_options(**SMALL))
    assert background.is_running()


def test_a_program_that_fails_ends_the_reading_of_weights(gate, monkeypatch):
    load, told = build.load_params, []

    def read(*arguments, progress, **options):
        assert gate.asked.wait(60)
        gate.error = RuntimeError("no such instruction")
        gate.open.set()
        while background.is_running():
            pass
        told.append(True)
        return load(*arguments, progress=progress, **options)

    monkeypatch.setattr(build, "load_params", read)
    with pytest.raises(RuntimeError, match="no such instruction"):
        build.build_engine(EngineConfig.from_options(**SMALL))
    assert told


def test_the_step_whose_memory_counts_is_compiled_beside_whoever_waits_for_it():
    """A compiler cannot be interrupted, and whoever has asked for `tpu-serve compile` may want to."""
    threads = []

    def compile(program):
        threads.append((program.name, threading.current_thread()))
        return Made(None)

    config = EngineConfig.from_options(**SMALL)
    design = design_engine(config, read_config(Path(MODEL)), cpu_chip(), make_mesh(jax.devices()[:1]))
    plan = design.plan(config)
    maker = compiling.ProgramMaker(config, design, Allowed(100), compile=compile)
    assert maker.largest(plan) is maker.largest(plan)
    ((name, thread),) = threads
    assert name == LARGEST
    assert thread is not threading.current_thread()


def unforeseen(x):
    return x * 3 + 1


def compile_twice():
    for length in (3, 4):
        jax.jit(unforeseen)(np.ones(length, np.float32)).block_until_ready()


@pytest.mark.parametrize("policy", ["count", "warn"])
def test_what_is_compiled_after_the_start_is_counted_and_told_once(policy, whole, caplog):
    found = Recompiles(policy, lambda error: pytest.fail("the engine goes on"))
    jax.clear_caches()
    before = whole.engine.num_recompiled()
    with caplog.at_level(logging.WARNING, "tpu_serve"):
        compile_twice()
    assert len(caplog.messages) == (policy == "warn")
    assert all("jit(unforeseen) was compiled after the start" in message for message in caplog.messages)
    assert (found.num, whole.engine.num_recompiled() - before) == (2, 2)
    assert whole.generate([[1, 2]], GREEDY)[0].outputs[0].finish_reason is FinishReason.LENGTH
    assert found.num == 2


def test_what_is_compiled_after_the_start_can_end_the_engine():
    llm = LLM(**SMALL | {"on_recompile": "error"})
    jax.clear_caches()
    compile_twice()
    for _ in range(2):  # and it stays so
        with pytest.raises(
            Recompiled, match=r"jit\(unforeseen\) was compiled after the start \(--on-recompile error\)"
        ):
            llm.generate([[1, 2]], GREEDY)


def test_another_engines_start_is_no_recompilation(whole):
    before = whole.engine.num_recompiled()
    LLM(**{**SMALL, "num_pages": 65})
    assert whole.engine.num_recompiled() == before
