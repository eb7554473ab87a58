"""The line that says every few seconds what the engine does."""

from types import SimpleNamespace

from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.reading import read
from tpu_serve.request import Request, SamplingParams
from tpu_serve.scheduler.cache import Cache
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.step import SampledToken
from tpu_serve.server.stats_line import StatsLine


def test_the_line_counts_since_the_one_before_and_is_silent_when_idle():
    scheduler = Scheduler(Cache([PagePool(11, 4)]), max_num_seqs=2, max_num_batched_tokens=32, max_model_len=40)
    core = EngineCore(scheduler, SimpleNamespace(compile_count=0))
    line = StatsLine(lambda: read(core, (0, 0.0), 0, (0, 0)))
    assert line.take(10) is None
    for name in "abc":
        scheduler.add(Request(id=name, prompt_token_ids=(7,) * 9, params=SamplingParams(max_tokens=2)))
    step = scheduler.schedule()
    assert line.take(2) == (
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 40.0%, Prefix cache hit rate: 44.4%"
    ), "the second prompt shares 8 of its 9 tokens with the first"
    scheduler.commit(step, [SampledToken(1), SampledToken(1)])
    assert "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 1.0 tokens/s" in line.take(2)
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.commit(step, [SampledToken(1) for _ in step.scheduled])
    assert "Running: 0 reqs, Waiting: 0 reqs" in line.take(2)
    assert line.take(2) is None
