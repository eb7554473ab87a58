"""Sizes that follow from options, model and chip: decided, and refused where they do not fit, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import GIB, Chip
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.runner.buckets import token_buckets
from tpu_serve.runner.pack import PackLayout

CPU_CACHE_SHARE = 0.25
"""Without --kv-cache-memory-bytes, the KV cache takes at most this share of a CPU host's memory, and no more than all sequences can use."""
QUEUE_PER_SEQUENCE = 16
SMALL_MODEL_BYTES, SMALL_MODEL_GROWTH = 64 * 2**20, 32
"""A model this small computes padding faster than a CPU compiles another program, so its token buckets lie further apart."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Sizes of an engine; tokens, pages or sequences as the names say."""

    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int
    buckets: tuple[int, ...]

    def layouts(self, num_slots: int, pages_per_block: int) -> list[PackLayout]:
        """One pack layout per bucket. Page tables are as wide as the longest sequence, rounded up to whole blocks of pages."""
        pages = -(-self.max_model_len // self.page_size)
        width = -(-pages // pages_per_block) * pages_per_block
        return [
            PackLayout(size, min(size, self.max_num_seqs), width, self.page_size, num_slots) for size in self.buckets
        ]


def make_plan(
    config: EngineConfig, model_max_len: int, param_bytes: int, layout: CacheLayout, chip: Chip
) -> EnginePlan:
    """Decides the sizes.

    Args:
      config: options.
      model_max_len: longest sequence that the model was made for.
      param_bytes: weights on each device.
      layout: of what each device holds of the KV cache.
      chip: each of the devices.

    Raises:
      ConfigError: something does not fit; the message has the number and the flag.
    """
    cache, options = config.cache, config.scheduler
    max_model_len = config.model.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's own limit of {model_max_len} tokens (config.json)."
        )
    page_size = cache.page_size or chip.page_size
    # One of the two limits given: the other one's default gives way. Both given and contradictory: an error.
    given = config.compile.token_buckets
    default_budget = given[-1] if given else max(chip.max_num_batched_tokens, options.max_num_seqs or 0)
    budget = options.max_num_batched_tokens or default_budget
    max_num_seqs = options.max_num_seqs or min(chip.max_num_seqs, budget)
    if max_num_seqs > budget:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} is more than --max-num-batched-tokens {budget}: each running sequence needs one token of a step."
        )
    small = not chip.is_tpu and param_bytes < SMALL_MODEL_BYTES
    return EnginePlan(
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=_num_pages(config, max_model_len, page_size, max_num_seqs, param_bytes, layout, chip),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued=options.max_num_queued_reqs or QUEUE_PER_SEQUENCE * max_num_seqs,
        buckets=token_buckets(
            budget, SMALL_MODEL_GROWTH if small else chip.bucket_growth, config.compile.token_buckets
        ),
    )


def _num_pages(
    config: EngineConfig,
    max_model_len: int,
    page_size: int,
    max_num_seqs: int,
    param_bytes: int,
    layout: CacheLayout,
    chip: Chip,
) -> int:
    cache = config.cache
    page_bytes = layout.page_bytes(page_size)
    per_sequence = -(-max_model_len // page_size)
    useful = max_num_seqs * per_sequence + 1  # and the padding page
    usable = int(chip.memory_bytes * cache.device_memory_utilization)
    if param_bytes > usable:
        raise ConfigError(
            f"The weights need {param_bytes / GIB:.2f} GiB on each device; it has {chip.memory_bytes / GIB:.2f} GiB, of which "
            f"--device-memory-utilization {cache.device_memory_utilization} leaves {usable / GIB:.2f} GiB.{_more_devices(chip)}"
        )
    if cache.num_pages:
        num_pages, origin = cache.num_pages, f"--num-pages {cache.num_pages}"
    elif cache.kv_cache_memory_bytes:
        num_pages, origin = min(useful, cache.kv_cache_memory_bytes // page_bytes), "--kv-cache-memory-bytes"
    else:
        room = (
            usable - param_bytes if chip.is_tpu else min(usable - param_bytes, int(chip.memory_bytes * CPU_CACHE_SHARE))
        )
        num_pages, origin = (
            min(useful, room // page_bytes),
            "the memory left for the KV cache (--kv-cache-memory-bytes sets it)",
        )
    if num_pages * page_bytes > usable - param_bytes:
        raise ConfigError(
            f"A KV cache of {num_pages} pages needs {num_pages * page_bytes / GIB:.2f} GiB ({origin}); beside the weights "
            f"{(usable - param_bytes) / GIB:.2f} GiB are free. Lower it, or raise --device-memory-utilization.{_more_devices(chip)}"
        )
    if num_pages - 1 < per_sequence:
        fits = (num_pages - 1) * page_size
        advice = f"Use --max-model-len {fits} or less" if fits >= 2 else "Use more memory"
        raise ConfigError(
            f"One sequence of --max-model-len {max_model_len} tokens needs {per_sequence} pages of {page_size} tokens and one for padding "
            f"({(per_sequence + 1) * page_bytes / GIB:.3f} GiB); {origin} gives {num_pages}. {advice}."
        )
    return num_pages


def _more_devices(chip: Chip) -> str:
    return " On more devices (--tensor-parallel-size) each holds less." if chip.is_tpu else ""
