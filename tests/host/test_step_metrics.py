"""What is told of the engine's steps: how long they take by kind, and how much of them is padding."""

from prometheus_client import CollectorRegistry

from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.reading import record
from tpu_serve.request import Request, SamplingParams
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken
from tpu_serve.server.metric_families import Families, token_buckets
from tpu_serve.server.step_metrics import StepMetrics

LABELS = {"model_name": "m", "engine": "0"}


class Runner:
    """Samples the same token for every row."""

    compile_count = 0

    def launch(self, output):
        return output

    def collect(self, ticket):
        return [SampledToken(1) if item.samples else None for item in ticket.scheduled]

    def reset(self): ...


class Engine:
    """Tells of its steps as one in this process does."""

    def __init__(self, core):
        self._core = core

    def follow_steps(self, on_step):
        self._core.on_step = lambda output, seconds: on_step(record(output, seconds, (8, 16, 32)))


def make():
    scheduler = Scheduler(Cache([PagePool(40, 4)]), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=40)
    core = EngineCore(scheduler, Runner())
    families, registry = Families(tuple(LABELS.values()), ("own",)), CollectorRegistry()
    steps = StepMetrics(tuple(LABELS.values()), families)
    registry.register(families)
    steps.watch(Engine(core))
    return core, registry


def run(core):
    while core.has_work:
        core.step()


def counts(registry):
    return [
        registry.get_sample_value("own:step_time_seconds_count", {**LABELS, "kind": kind})
        for kind in ("prefill", "decode", "mixed")
    ]


def test_steps_are_told_by_kind_and_padding_by_what_was_computed():
    core, registry = make()
    assert registry.get_sample_value("own:padded_tokens_ratio", LABELS) == 0
    core.add(Request(id="a", prompt_token_ids=(7,) * 9, params=SamplingParams(max_tokens=3)))
    run(core)
    assert counts(registry) == [1, 2, 0]
    # 9 tokens in a bucket of 16, then twice 1 in 8.
    assert registry.get_sample_value("own:padded_tokens_ratio", LABELS) == 1 - 11 / 32
    core.add(Request(id="b", prompt_token_ids=(5,) * 3, params=SamplingParams(max_tokens=4)))
    core.step()
    core.step()
    core.add(Request(id="c", prompt_token_ids=(6,) * 15, params=SamplingParams(max_tokens=1)))
    run(core)
    # b: 3 tokens, then decodes; one of its steps is shared with the 15 of c.
    assert counts(registry) == [2, 4, 1]
    assert registry.get_sample_value("own:padded_tokens_ratio", LABELS) == 1 - (11 + 3 + 3 + 15) / (32 + 8 + 8 + 16 + 8)
    assert core.num_steps == 7
    total = sum(
        registry.get_sample_value("own:step_time_seconds_sum", {**LABELS, "kind": kind})
        for kind in ("prefill", "decode", "mixed")
    )
    assert 0 < total <= core.busy_seconds


def test_bounds_of_token_counts():
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_buckets(1) == (1,)
    assert token_buckets(131072)[-1] == 100000
