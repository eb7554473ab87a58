"""How the memory that weights leave is shared out between pages of keys and values and recurrent state."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import GIB, Chip
from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.scheduler.page_pool import most_pages
from tpu_serve.scheduler.scheduler import num_slots

logger = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.25
"""Without --kv-cache-memory-bytes, the caches take at most this share of a CPU host's memory, and no more than all sequences can use."""
WINDOW_SHARE = 0.5
"""Layers with a sliding window get the pages that all sequences can use of them, but no more than this share of the memory."""
SNAPSHOT_SHARE = 0.125
"""Snapshots of recurrent state take at most this share of the memory unless --num-state-snapshots says how many there are."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the caches are for.

    Attributes:
      max_model_len: tokens of the longest sequence.
      page_size: tokens of a page.
      max_num_seqs: sequences in a step.
      max_num_batched_tokens: tokens in a step.
      num_decode_steps: tokens that one launch computes of a sequence that decodes.
    """

    max_model_len: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_decode_steps: int = 1

    def one_sequence(self, window: int | None, decoding: bool = False) -> int:
        """Pages that the longest sequence holds at most, or while it is decoded."""
        most_at_once = self.num_decode_steps if decoding else max(self.num_decode_steps, self.max_num_batched_tokens)
        return most_pages(self.max_model_len, most_at_once, self.page_size, window)

    def useful(self, window: int | None) -> int:
        """Pages that can be in use at a time, and the padding page."""
        all_alike = self.max_num_seqs * self.one_sequence(window)
        if window is None:
            return all_alike + 1
        # The tokens of one step are shared out among the sequences; each of their chunks may begin one more page.
        decoding = self.one_sequence(window, decoding=True)
        chunks = -(-self.max_num_batched_tokens // self.page_size) + self.max_num_seqs
        return min(all_alike, self.max_num_seqs * decoding + chunks) + 1


CALCULATED, COMPILED = "calculated", "compiled"
"""Where figures of a step come from: sizes alone, or the compiler's own account of its program."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What steps take on a device beside their arguments.

    Attributes:
      temporary_bytes: what the most demanding step keeps while it runs, whatever the caches' size.
      per_cache_byte: the same for each byte of the caches, of a step that copies parts of them.
      code_bytes: of all programs.
      origin: `CALCULATED` or `COMPILED`.
    """

    temporary_bytes: int = 0
    per_cache_byte: float = 0.0
    code_bytes: int = 0
    origin: str = CALCULATED

    @property
    def fixed_bytes(self) -> int:
        return self.temporary_bytes + self.code_bytes

    def temporaries(self, cache_bytes: int) -> int:
        """Of a step on caches of this size, rounded up."""
        return self.temporary_bytes + math.ceil(self.per_cache_byte * cache_bytes)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Pages for each window, rows for snapshots of recurrent state (None without such state), and what all of it takes on a device."""

    num_pages: tuple[int, ...]
    num_snapshots: int | None
    num_bytes: int


def usable_bytes(config: EngineConfig, chip: Chip) -> int:
    """What an engine may take of a device's memory."""
    return int(chip.memory_bytes * config.cache.device_memory_utilization)


def share_memory(
    config: EngineConfig,
    layout: CacheLayout,
    chip: Chip,
    param_bytes: int,
    sampler_bytes: int,
    demand: Demand,
    step: StepBytes = StepBytes(),
) -> CacheSizes:
    """Decides the sizes.

    Args:
      layout: of what each device holds.
      chip: each of the devices.
      param_bytes: weights on each device.
      sampler_bytes: what the sampler keeps of all sequences, on each device.
      step: what steps take besides.

    Raises:
      ConfigError: something does not fit; the message has the number and the flag.
    """
    cache = config.cache
    usable = usable_bytes(config, chip)
    if param_bytes > usable:
        raise ConfigError(
            f"The weights need {param_bytes / GIB:.2f} GiB on each device; it has {chip.memory_bytes / GIB:.2f} GiB, of which "
            f"--device-memory-utilization {cache.device_memory_utilization} leaves {usable / GIB:.2f} GiB.{_more_devices(chip)}"
        )
    free = usable - param_bytes - sampler_bytes
    if free < 0:
        raise ConfigError(
            f"Counts of tokens and biases of {num_slots(demand.max_num_seqs)} slots (two for each of --max-num-seqs {demand.max_num_seqs}) "
            f"need {sampler_bytes / GIB:.2f} GiB on each device; beside the weights {(usable - param_bytes) / GIB:.2f} GiB are free. "
            f"Lower --max-num-seqs.{_more_devices(chip)}"
        )
    beside = "the weights"
    if step.fixed_bytes:
        if step.fixed_bytes > free:
            raise ConfigError(
                f"Steps of {demand.max_num_batched_tokens} tokens need {step.temporary_bytes / GIB:.2f} GiB of temporary arrays and their programs "
                f"{step.code_bytes / GIB:.2f} GiB on each device ({step.origin}); beside the weights {free / GIB:.2f} GiB are free. "
                f"Lower --max-num-batched-tokens, or raise --device-memory-utilization.{_more_devices(chip)}"
            )
        free -= step.fixed_bytes
        beside = f"the weights and {step.fixed_bytes / GIB:.2f} GiB of steps ({step.origin})"
    free = int(free / (1 + step.per_cache_byte))  # the caches, with their copies, take what is left
    if cache.kv_cache_memory_bytes:
        room, origin = cache.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    else:
        room = free if chip.is_tpu else min(free, int(chip.memory_bytes * CPU_CACHE_SHARE))
        origin = "the memory left for the KV cache (--kv-cache-memory-bytes sets it)"
    num_snapshots, state_bytes = _state(config, layout, demand, room, origin)
    num_pages = _pages(config, layout, demand, room - state_bytes)
    if cache.num_pages:
        origin = f"--num-pages {cache.num_pages}"
    page_bytes = [layout.page_bytes(demand.page_size, window) for window in layout.windows]
    total = sum(count * size for count, size in zip(num_pages, page_bytes, strict=True)) + state_bytes
    if total > free:
        raise ConfigError(
            f"A KV cache of {num_pages[0]} pages needs {total / GIB:.2f} GiB ({origin}); beside {beside} "
            f"{free / GIB:.2f} GiB are free. Lower it, or raise --device-memory-utilization.{_more_devices(chip)}"
        )
    for count, size, window in zip(num_pages, page_bytes, layout.windows, strict=True):
        needed = demand.one_sequence(window)
        if count - 1 < needed:
            fits = (count - 1) * demand.page_size
            advice = f"Use --max-model-len {fits} or less" if fits >= 2 and window is None else "Use more memory"
            seeing = "" if window is None else f" in layers that see {window} tokens"
            raise ConfigError(
                f"One sequence of --max-model-len {demand.max_model_len} tokens needs {needed} pages of {demand.page_size} tokens and one "
                f"for padding ({(needed + 1) * size / GIB:.3f} GiB){seeing}; {origin} gives {max(0, count)}. {advice}."
            )
    return CacheSizes(num_pages, num_snapshots, total)


def _pages(config: EngineConfig, layout: CacheLayout, demand: Demand, room: int) -> tuple[int, ...]:
    """Pages for each window. The first window takes what the others leave."""
    first, *others = layout.windows
    counts = []
    for window in others:
        size = layout.page_bytes(demand.page_size, window)
        at_most = max(demand.one_sequence(window) + 1, int(room * WINDOW_SHARE) // len(others) // size)
        counts.append(min(demand.useful(window), at_most))
        room -= counts[-1] * size
    if config.cache.num_pages:
        return (config.cache.num_pages, *(min(count, max(config.cache.num_pages, 2)) for count in counts))
    return (min(demand.useful(first), room // layout.page_bytes(demand.page_size, first)), *counts)


def _state(config: EngineConfig, layout: CacheLayout, demand: Demand, room: int, origin: str) -> tuple[int | None, int]:
    """Snapshots, and bytes of all recurrent state; (None, 0) without such state."""
    given = config.cache.num_state_snapshots
    if not layout.has_state:
        if given is not None:
            raise ConfigError(
                f"--num-state-snapshots {given} is for models with recurrent layers; all layers of this one are attention."
            )
        return None, 0
    slots = num_slots(demand.max_num_seqs)
    if slots * layout.state_bytes > room:
        windows = layout.windows
        left = room - sum((demand.one_sequence(one) + 1) * layout.page_bytes(demand.page_size, one) for one in windows)
        fewer = left // (num_slots(1) * layout.state_bytes)
        advice = f"Use --max-num-seqs {fewer} or less" if fewer > 0 else "Use more memory"
        raise ConfigError(
            f"Recurrent state of {slots} slots (two for each of --max-num-seqs {demand.max_num_seqs}) needs "
            f"{slots * layout.state_bytes / GIB:.2f} GiB on each device; {origin} is {room / GIB:.2f} GiB. {advice}."
        )
    if not config.cache.enable_prefix_caching:
        return 0, slots * layout.state_bytes
    left = int((room - slots * layout.state_bytes) * SNAPSHOT_SHARE)
    count = min(demand.max_num_seqs, left // layout.state_bytes) if given is None else given
    if (slots + count) * layout.state_bytes > room:
        raise ConfigError(
            f"--num-state-snapshots {count} and {slots} slots (two for each of --max-num-seqs {demand.max_num_seqs}) need "
            f"{(slots + count) * layout.state_bytes / GIB:.2f} GiB of recurrent state on each device; {origin} is {room / GIB:.2f} GiB. "
            "Lower --num-state-snapshots."
        )
    if not count:
        logger.warning(
            "The prefix cache has no room for recurrent state and finds nothing: --num-state-snapshots is %s",
            "0" if given == 0 else f"0 because one takes {layout.state_bytes / GIB:.3f} GiB",
        )
    return count, (slots + count) * layout.state_bytes


def _more_devices(chip: Chip) -> str:
    return " On more devices (--tensor-parallel-size) each holds less." if chip.is_tpu else ""
