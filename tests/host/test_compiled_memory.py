"""Pages that follow from a compiler's figures, which are made up here."""

import math

import pytest

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.config.engine import LONGEST_THAT_FITS
from tpu_serve.device.chip import GIB, MIB, Chip
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.engine.compiled_memory import Budget, ProgramBytes, settle, verify
from tpu_serve.engine.memory import StepBytes, usable_bytes
from tpu_serve.engine.plan import make_plan

CHIP = Chip("v6e", 4 * GIB, page_size=16, max_num_seqs=64, max_num_batched_tokens=256)
LAYOUT = CacheLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=32, dtype="bfloat16")
PAGE = 16 * 4 * 2 * 2 * 32 * 2
WEIGHTS = GIB


class Compiler:
    """What a step takes: `fixed` bytes and so many for each byte of the caches; `code` for each program."""

    def __init__(self, fixed, per_cache_byte=0.0, code=10 * MIB, model_max_len=2**17, **options):
        self.fixed, self.slope, self.code, self.model_max_len = fixed, per_cache_byte, code, model_max_len
        self.config = EngineConfig.from_options(device_memory_utilization=1, **options)
        self.compiled = []

    def plan(self, step):
        return make_plan(self.config, self.model_max_len, 1000, WEIGHTS, LAYOUT, CHIP, lambda demand, buckets: step)

    @property
    def budget(self):
        return Budget(usable_bytes(self.config, CHIP), WEIGHTS, self.plan(StepBytes()).sampler_bytes)

    def compile(self, plan):
        self.compiled.append(plan.num_pages[0])
        state = plan.num_pages[0] * PAGE + self.budget.sampler
        scratch = self.fixed + int(self.slope * plan.num_pages[0] * PAGE)
        return ProgramBytes(WEIGHTS + state, state, state, scratch, self.code)

    def settle(self, assumed):
        return settle(self.plan(assumed), self.budget, assumed, self.compile, self.plan, lambda code: 3 * code)

    def most_pages(self):
        free = 3 * GIB - self.budget.sampler - self.fixed - 3 * self.code
        return math.floor(free / (1 + self.slope) / PAGE)


def test_figures_that_were_about_right_are_compiled_for_once():
    compiler = Compiler(fixed=100 * MIB)
    plan = compiler.settle(StepBytes(150 * MIB, code_bytes=60 * MIB))
    assert compiler.compiled == [plan.num_pages[0]]
    assert (plan.temporary_bytes, plan.code_bytes, plan.figures) == (100 * MIB, 30 * MIB, "compiled")
    assert compiler.budget.left(plan) == pytest.approx(80 * MIB, abs=PAGE)


@pytest.mark.parametrize("assumed", [0, 900 * MIB])
def test_planned_again_where_it_does_not_fit_or_leaves_much(assumed):
    compiler = Compiler(fixed=400 * MIB)
    plan = compiler.settle(StepBytes(assumed))
    assert len(compiler.compiled) == 2
    assert plan.num_pages[0] == compiler.compiled[-1] == compiler.most_pages()
    assert 0 <= compiler.budget.left(plan) < PAGE


@pytest.mark.parametrize("slope", [0.02, 0.5, 2.0])
def test_a_step_that_copies_caches_is_solved_for(slope):
    compiler = Compiler(fixed=50 * MIB, per_cache_byte=slope)
    plan = compiler.settle(StepBytes(60 * MIB))
    assert len(compiler.compiled) <= 3
    assert compiler.budget.left(plan) >= 0
    assert compiler.most_pages() - plan.num_pages[0] <= 2 + 0.04 * 4 * GIB / PAGE
    again = Compiler(fixed=50 * MIB, per_cache_byte=slope)
    assert again.settle(StepBytes(90 * MIB, slope)).num_pages[0] == pytest.approx(again.most_pages(), rel=0.03)
    assert len(again.compiled) == 1, "the slope was known"


def test_pages_that_were_asked_for_are_compiled_for_once():
    compiler = Compiler(fixed=MIB, num_pages=9000)
    assert compiler.settle(StepBytes(GIB)).num_pages == (9000,)
    assert compiler.compiled == [9000]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"fixed": 4 * GIB},
            r"256 tokens need 4.00 GiB of temporary arrays .* \(compiled\).* Lower --max-num-batched-tokens",
        ),
        (
            {"fixed": 2 * GIB, "num_pages": 70_000},
            r"70000 pages needs 1.07 GiB \(--num-pages 70000\); beside the weights and 2.03 GiB",
        ),
        (
            {"fixed": 2940 * MIB},
            r"One sequence of --max-model-len 131072 tokens needs 8192 pages.*Use --max-model-len \d+",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(options, words):
    compiler = Compiler(**options)
    with pytest.raises(ConfigError, match=words):
        compiler.settle(StepBytes())


def test_the_longest_sequences_by_the_compilers_figures():
    compiler = Compiler(fixed=2940 * MIB, max_model_len=LONGEST_THAT_FITS)
    plan = compiler.settle(StepBytes())
    assert plan.num_pages[0] == compiler.most_pages()
    assert plan.max_model_len == (plan.num_pages[0] - 1) * 16


def test_a_backend_that_tells_nothing():
    compiler = Compiler(fixed=MIB)
    first = compiler.plan(StepBytes(5 * MIB))
    assert settle(first, compiler.budget, StepBytes(5 * MIB), lambda plan: None, compiler.plan, int) == first


def test_all_programs_together():
    compiler = Compiler(fixed=100 * MIB, code=10 * MIB)
    plan = compiler.plan(StepBytes(150 * MIB, code_bytes=50 * MIB))
    program = compiler.compile(plan)
    names = [f"step of {size} tokens" for size in plan.buckets]
    done = verify(plan, compiler.budget, dict.fromkeys(names, program) | {"fresh state": ProgramBytes(0, 7, 0, 0, MIB)})
    assert (done.temporary_bytes, done.code_bytes) == (100 * MIB, (len(names) * 10 + 1) * MIB)
    assert done.num_pages == plan.num_pages
    large = Compiler(fixed=100 * MIB, code=100 * MIB).compile(plan)
    with pytest.raises(ConfigError, match=r"programs .compiled. 0.586; -0.4.* The step of 8 tokens takes the most"):
        verify(plan, compiler.budget, dict.fromkeys(names, large))


@pytest.mark.parametrize(
    ("words", "mib"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (90.5G) exceeds available HBM (31.25G).",
            90.5 * 1024,
        ),
        (
            "Ran out of memory in memory space hbm. Used 33.5G of 31.25G hbm. Exceeded hbm capacity by 2.2G.",
            33.5 * 1024,
        ),
        ("Ran out of memory in memory space vmem. Used 67.13M of 64.00M vmem.", None),
        ("a shape is wrong", None),
    ],
)
def test_what_libtpu_refuses_takes_as_much_as_it_says(words, mib):
    told = ProgramBytes.of_refusal(RuntimeError(f"RESOURCE_EXHAUSTED: {words}"))
    assert (told and told.running) == (mib and mib * MIB)
