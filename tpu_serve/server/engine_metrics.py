"""What the engine itself knows, read at the time of a scrape, so that it can never lag behind."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tpu_serve.engine.engine import Engine
from tpu_serve.scheduler.step import SchedulerStats
from tpu_serve.server.metric_families import Reading

CACHE_SIZES = (
    "block_size",
    "num_gpu_blocks",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "cache_dtype",
    "enable_prefix_caching",
)


class EngineMetrics(Collector):
    """What other servers of this kind tell too. Zeros while there is no engine.

    Attributes:
      engine: is read; None before it is built.
    """

    def __init__(self, labels: tuple[str, str]):
        self._reading = Reading(labels)
        self.engine: Engine | None = None

    def collect(self) -> Iterator[Metric]:
        reading = self._reading
        scheduler = None if self.engine is None else self.engine.core.scheduler
        stats = SchedulerStats() if scheduler is None else scheduler.stats
        has_cache = scheduler is not None and scheduler.enable_prefix_caching
        num_waiting = len(scheduler.waiting) if scheduler else 0
        yield reading.gauge("num_requests_running", "Requests in the batch", len(scheduler.running) if scheduler else 0)
        yield reading.gauge("num_requests_waiting", "Requests in the queue", num_waiting)
        yield reading.gauges(
            "num_requests_waiting_by_reason",
            "Requests in the queue by why they wait: always for room",
            ("reason",),
            ((("capacity",), num_waiting), (("deferred",), 0)),
        )
        usage = scheduler.cache.usage if scheduler else 0.0
        yield reading.gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", usage)
        yield reading.gauges(
            "engine_sleep_state",
            "1 for the state that the engine is in: it never sleeps",
            ("sleep_state",),
            ((("awake",), 1), (("weights_offloaded",), 0), (("discard_all",), 0)),
        )
        yield reading.counter(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            stats.prefix_queries if has_cache else 0,
        )
        yield reading.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits)
        yield reading.counter("num_preemptions", "Requests that lost their pages", stats.num_preemptions)
        yield reading.counter(
            "corrupted_requests",
            "Requests that failed because the model's output was not a number",
            stats.num_not_numbers,
        )
        yield reading.gauges(
            "cache_config_info",
            "1, with the sizes of the KV cache as labels",
            CACHE_SIZES,
            [] if self.engine is None else [(_cache_sizes(self.engine), 1)],
        )


def _cache_sizes(engine: Engine) -> list[str]:
    """Values of `CACHE_SIZES`, of the first pool of pages; where layers of several windows share a model, those that see most have it."""
    scheduler = engine.core.scheduler
    pool, num_pages = scheduler.cache.pools[0], scheduler.cache.pools[0].num_usable
    longest = max(1, pool.most_pages(scheduler.max_model_len, 1))
    values = (
        pool.page_size,
        num_pages,
        num_pages * pool.page_size,
        f"{num_pages / longest:.2f}",
        engine.config.cache.kv_cache_dtype,
        scheduler.enable_prefix_caching,
    )
    return [str(value) for value in values]


class OwnMetrics(Collector):
    """What only this server tells. Zeros while there is no engine."""

    def __init__(self, labels: tuple[str, str]):
        self._reading = Reading(labels)
        self._engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """Reads this engine from now on."""
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        reading, engine = self._reading, self._engine
        core = None if engine is None else engine.core
        num_compiled = 0 if core is None else core.runner.compile_count
        num_cached, seconds = (0, 0.0) if engine is None else engine.compile_costs()
        num_recompiled = 0 if engine is None else engine.num_recompiled()
        num_ready, num_programs = (0, 0) if engine is None else engine.programs()
        yield reading.counter("steps", "Steps of the engine", 0 if core is None else core.num_steps)
        yield reading.counters(
            "compile",
            "Programs compiled or taken from the cache, for the start and unexpectedly since: the latter should stay 0",
            "phase",
            (("start", num_compiled - num_recompiled), ("serving", num_recompiled)),
        )
        yield reading.gauges(
            "programs",
            "Programs of the engine that are compiled, and that are still to be (--serve-while-compiling)",
            ("state",),
            ((("ready",), num_ready), (("compiling",), num_programs - num_ready)),
        )
        yield reading.counter("compile_seconds", "Time that compiling took, of all threads", seconds)
        yield reading.counter("compile_cache_hits", "Programs that came from the compile cache", num_cached)
        yield reading.gauges(
            "hbm_bytes",
            "Memory of each device by what it is for (planned), and as the device tells it (in_use, peak, limit)",
            ("kind",),
            [((kind,), size) for kind, size in (engine.memory_bytes().items() if engine else ())],
        )
        yield reading.gauges(
            "moe_plans",
            "Token buckets by how their experts run and where the tiles come from",
            ("path", "source"),
            sorted(engine.moe_plans.items()) if engine else (),
        )
