"""What a running engine tells of itself in numbers: at a moment, of a step, and of its cache once and for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import msgspec

from tpu_serve.engine.core import EngineCore
from tpu_serve.runner.buckets import pick
from tpu_serve.scheduler.data_parallel import AnyScheduler
from tpu_serve.scheduler.step import SchedulerOutput, SchedulerStats

StepKind = Literal["prefill", "decode", "mixed"]


class Reading(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An engine at a moment; zeros before there is one. Ranks of data parallelism count together.

    Attributes:
      num_running, num_waiting: requests in the batch, and those without a slot.
      num_waiting_tokens: prompt tokens of the latter.
      cache_usage: share of the KV cache in use, 0 to 1.
      stats: counters of the scheduler.
      num_steps: steps launched; a launch may hold several.
      num_compiled: programs compiled so far.
      num_recompiled: programs that were compiled since the engine was ready and that it did not expect.
      num_cache_hits: programs that came from the compile cache.
      compile_seconds: what compiling took.
      num_programs_ready, num_programs: programs that are compiled, and all.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    cache_usage: float = 0.0
    stats: SchedulerStats = msgspec.field(default_factory=SchedulerStats)
    num_steps: int = 0
    num_compiled: int = 0
    num_recompiled: int = 0
    num_cache_hits: int = 0
    compile_seconds: float = 0.0
    num_programs_ready: int = 0
    num_programs: int = 0


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """A launch that has been committed.

    Attributes:
      kind: what its rows are: chunks of prompts, single tokens, or both.
      num_steps: steps in it.
      seconds: of all of them, from the launch of the next one to the commit.
      num_tokens: computed for sequences.
      num_places: computed at all, padding included; 0 where buckets are not known.
    """

    kind: StepKind
    num_steps: int
    seconds: float
    num_tokens: int
    num_places: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheFacts:
    """The KV cache of an engine, the first pool of its pages; where layers of several windows share a model, those that see most have it.

    Attributes:
      page_size: tokens in a page.
      num_pages: pages that sequences can have.
      longest_pages: pages that the longest sequence takes.
      has_prefix_cache: finished prefixes are kept for others.
    """

    page_size: int
    num_pages: int
    longest_pages: int
    has_prefix_cache: bool


def read(core: EngineCore, compile_costs: tuple[int, float], num_recompiled: int, programs: tuple[int, int]) -> Reading:
    """An engine's numbers now. Read from another thread than the engine's they may be of two steps.

    Args:
      compile_costs: programs that came from the compile cache, and seconds that compiling took.
      programs: how many are compiled, and how many there are.
    """
    scheduler = core.scheduler
    stats = scheduler.stats
    return Reading(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_waiting_tokens=scheduler.num_waiting_tokens,
        cache_usage=scheduler.cache.usage,
        stats=dataclasses.replace(stats, finished=dict(stats.finished)),
        num_steps=core.num_steps,
        num_compiled=core.runner.compile_count,
        num_recompiled=num_recompiled,
        num_cache_hits=compile_costs[0],
        compile_seconds=compile_costs[1],
        num_programs_ready=programs[0],
        num_programs=programs[1],
    )


def record(output: SchedulerOutput, seconds: float, buckets: Sequence[int]) -> StepRecord:
    """What `EngineCore.on_step` is told, in numbers."""
    lengths = [row.length for rows in output.by_rank for row in rows[:1] + rows[-1:]]  # single tokens come first
    kind: StepKind = "prefill" if min(lengths) > 1 else "decode" if max(lengths) == 1 else "mixed"
    in_a_step = len(output.by_rank) * pick(buckets, output.num_tokens_of_largest) if buckets else 0
    return StepRecord(kind, output.num_steps, seconds, output.num_tokens_in_all, output.num_steps * in_a_step)


def cache_facts(scheduler: AnyScheduler) -> CacheFacts:
    """Of a scheduler, which need not have run."""
    pool = scheduler.cache.pools[0]
    longest = max(1, pool.most_pages(scheduler.max_model_len, 1))
    return CacheFacts(pool.page_size, pool.num_usable, longest, scheduler.enable_prefix_caching)
