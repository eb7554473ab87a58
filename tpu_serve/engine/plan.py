"""Sizes that follow from options, model and chip: decided, and refused where they do not fit, before any weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.config.engine import LONGEST_THAT_FITS
from tpu_serve.device.chip import Chip
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.device.sampler_state import num_bytes
from tpu_serve.engine.memory import CALCULATED, CacheSizes, Demand, StepBytes, share_memory
from tpu_serve.runner.buckets import token_buckets
from tpu_serve.runner.pack import PackLayout
from tpu_serve.scheduler.scheduler import num_slots

QUEUE_PER_SEQUENCE = 16
SMALL_MODEL_BYTES, SMALL_MODEL_BUCKETS = 16 * 2**20, (8, 32)
"""A model this small computes padding faster than a CPU compiles another program, so its token buckets (smallest, growth) lie further apart."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Sizes of an engine; tokens, pages or sequences as the names say.

    Attributes:
      num_pages: for each window of the model's attention layers, see `CacheLayout.windows`.
      num_snapshots: of recurrent state for the prefix cache; None for a model without such state.
      sampler_bytes: what the sampler keeps of all sequences, on each device.
      cache_bytes: pages and recurrent state on each device.
      temporary_bytes: what the most demanding step keeps on each device while it runs, beside its arguments.
      code_bytes: of all programs.
      figures: where the last two come from, "calculated" or "compiled".
      num_ranks: data ranks, each of which has so many pages, snapshots, sequences and tokens of a step.
    """

    max_model_len: int
    page_size: int
    num_pages: tuple[int, ...]
    num_snapshots: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int
    sampler_bytes: int
    buckets: tuple[int, ...]
    cache_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    figures: str = CALCULATED
    num_ranks: int = 1

    @property
    def expert_tokens(self) -> tuple[int, ...]:
        """Tokens that the experts get in a step of each bucket: those of all data ranks."""
        return tuple(self.num_ranks * size for size in self.buckets)

    @property
    def demand(self) -> Demand:
        """What the caches are for."""
        return Demand(self.max_model_len, self.page_size, self.max_num_seqs, self.max_num_batched_tokens)

    def concurrency(self, windows: Sequence[int | None]) -> float:
        """How many of the longest sequences can be decoded at a time.

        Args:
          windows: what `num_pages` are for.
        """
        return min(
            (pages - 1) / self.demand.one_sequence(window, decoding=True)
            for pages, window in zip(self.num_pages, windows, strict=True)
        )

    def layouts(self, num_slots: int, pages_per_block: int) -> list[PackLayout]:
        """One pack layout per bucket. Page tables are as wide as the longest sequence, rounded up to whole blocks of pages."""
        pages = -(-self.max_model_len // self.page_size)
        width = -(-pages // pages_per_block) * pages_per_block
        return [
            PackLayout(
                size,
                min(size, self.max_num_seqs),
                width,
                self.page_size,
                num_slots,
                len(self.num_pages),
                self.num_snapshots,
            )
            for size in self.buckets
        ]


def demand_of(config: EngineConfig, model_max_len: int, chip: Chip) -> Demand:
    """What the caches are for, of options and chip alone.

    Args:
      model_max_len: longest sequence that the model was made for.

    Raises:
      ConfigError: options contradict each other or the model.
    """
    options = config.scheduler
    max_model_len = config.model.given_max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's own limit of {model_max_len} tokens (config.json)."
        )
    # One of the two limits given: the other one's default gives way. Both given and contradictory: an error.
    given = config.compile.token_buckets
    default_budget = given[-1] if given else max(chip.max_num_batched_tokens, options.max_num_seqs or 0)
    budget = options.max_num_batched_tokens or default_budget
    max_num_seqs = options.max_num_seqs or min(chip.max_num_seqs, budget)
    if max_num_seqs > budget:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} is more than --max-num-batched-tokens {budget}: each running sequence needs one token of a step."
        )
    page_size = config.cache.page_size or chip.page_size
    return Demand(max_model_len, page_size, max_num_seqs, budget, options.num_decode_steps)


def _longest_that_fits(demand: Demand, share: Callable[[Demand], CacheSizes]) -> Demand:
    """The demand, with sequences of fewer pages if those of the model's own length do not fit.

    Args:
      share: raises `ConfigError` for what does not fit.

    Raises:
      ConfigError: of `share`, for sequences of one page.
    """

    def fits(num_pages: int) -> bool:
        try:
            share(dataclasses.replace(demand, max_model_len=num_pages * demand.page_size))
        except ConfigError:
            return False
        return True

    low, high = 1, (demand.max_model_len - 1) // demand.page_size
    try:
        share(demand)
        return demand
    except ConfigError:
        if not high:
            raise
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return dataclasses.replace(demand, max_model_len=low * demand.page_size)


StepBytesOf = Callable[[Demand, Sequence[int]], StepBytes]
"""What steps take, of what caches are for and the token buckets."""


def _nothing(demand: Demand, buckets: Sequence[int]) -> StepBytes:
    return StepBytes()


def make_plan(
    config: EngineConfig,
    model_max_len: int,
    vocab_size: int,
    param_bytes: int,
    layout: CacheLayout,
    chip: Chip,
    step_bytes: StepBytesOf = _nothing,
) -> EnginePlan:
    """Decides the sizes.

    Args:
      config: options.
      model_max_len: longest sequence that the model was made for.
      vocab_size: token ids that the model has logits for.
      param_bytes: weights on each device.
      layout: of what each device holds of the KV cache.
      chip: each of the devices.
      step_bytes: what steps take besides.

    Raises:
      ConfigError: something does not fit; the message has the number and the flag.
    """
    demand = demand_of(config, model_max_len, chip)
    small = not chip.is_tpu and param_bytes < SMALL_MODEL_BYTES
    smallest, growth = SMALL_MODEL_BUCKETS if small else (chip.smallest_bucket, chip.bucket_growth)
    buckets = token_buckets(demand.max_num_batched_tokens, smallest, growth, config.compile.token_buckets)
    sampler_bytes = num_bytes(num_slots(demand.max_num_seqs), vocab_size)
    num_ranks = config.parallel.data_parallel_size

    def share(demand: Demand) -> CacheSizes:
        return share_memory(config, layout, chip, param_bytes, sampler_bytes, demand, step_bytes(demand, buckets))

    if config.model.max_model_len == LONGEST_THAT_FITS:
        demand = _longest_that_fits(demand, share)
    sizes = share(demand)
    step = step_bytes(demand, buckets)
    return EnginePlan(
        max_model_len=demand.max_model_len,
        page_size=demand.page_size,
        num_pages=sizes.num_pages,
        num_snapshots=sizes.num_snapshots,
        max_num_seqs=demand.max_num_seqs,
        max_num_batched_tokens=demand.max_num_batched_tokens,
        max_num_queued=config.scheduler.max_num_queued_reqs or QUEUE_PER_SEQUENCE * demand.max_num_seqs * num_ranks,
        sampler_bytes=sampler_bytes,
        buckets=buckets,
        cache_bytes=sizes.num_bytes,
        temporary_bytes=step.temporaries(sizes.num_bytes),
        code_bytes=step.code_bytes,
        figures=step.origin,
        num_ranks=num_ranks,
    )
