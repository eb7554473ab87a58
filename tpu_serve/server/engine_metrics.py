"""What the engine itself knows, read at the time of a scrape, so that it can never lag behind."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tpu_serve.engine.reading import Reading as EngineReading
from tpu_serve.engine.served import ServedEngine
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
        self.engine: ServedEngine | None = None

    def collect(self) -> Iterator[Metric]:
        reading = self._reading
        now = EngineReading() if self.engine is None else self.engine.reading()
        stats, num_waiting = now.stats, now.num_waiting
        has_cache = self.engine is not None and self.engine.cache.has_prefix_cache
        yield reading.gauge("num_requests_running", "Requests in the batch", now.num_running)
        yield reading.gauge("num_requests_waiting", "Requests in the queue", num_waiting)
        yield reading.gauges(
            "num_requests_waiting_by_reason",
            "Requests in the queue by why they wait: always for room",
            ("reason",),
            ((("capacity",), num_waiting), (("deferred",), 0)),
        )
        yield reading.gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", now.cache_usage)
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


def _cache_sizes(engine: ServedEngine) -> list[str]:
    """Values of `CACHE_SIZES`."""
    cache = engine.cache
    values = (
        cache.page_size,
        cache.num_pages,
        cache.num_pages * cache.page_size,
        f"{cache.num_pages / cache.longest_pages:.2f}",
        engine.config.cache.kv_cache_dtype,
        cache.has_prefix_cache,
    )
    return [str(value) for value in values]


class OwnMetrics(Collector):
    """What only this server tells. Zeros while there is no engine."""

    def __init__(self, labels: tuple[str, str]):
        self._reading = Reading(labels)
        self._engine: ServedEngine | None = None

    def watch(self, engine: ServedEngine) -> None:
        """Reads this engine from now on."""
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        reading, engine = self._reading, self._engine
        now = EngineReading() if engine is None else engine.reading()
        yield reading.counter("steps", "Steps of the engine", now.num_steps)
        yield reading.counters(
            "compile",
            "Programs compiled or taken from the cache, for the start and unexpectedly since: the latter should stay 0",
            "phase",
            (("start", now.num_compiled - now.num_recompiled), ("serving", now.num_recompiled)),
        )
        yield reading.gauges(
            "programs",
            "Programs of the engine that are compiled, and that are still to be (--serve-while-compiling)",
            ("state",),
            ((("ready",), now.num_programs_ready), (("compiling",), now.num_programs - now.num_programs_ready)),
        )
        yield reading.counter("compile_seconds", "Time that compiling took, of all threads", now.compile_seconds)
        yield reading.counter("compile_cache_hits", "Programs that came from the compile cache", now.num_cache_hits)
        yield reading.gauges(
            "hbm_bytes",
            "Memory of each device by what it is for (planned), and as the device tells it (in_use, peak, limit)",
            ("kind",),
            [((kind,), size) for kind, size in (engine.device_memory().items() if engine else ())],
        )
        yield reading.gauges(
            "moe_plans",
            "Token buckets by how their experts run and where the tiles come from",
            ("path", "source"),
            sorted(engine.moe_plans.items()) if engine else (),
        )
