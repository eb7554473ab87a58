"""Several schedulers that step together: each data rank has sequences, pages and slots of its own, and all of them run one program."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.scheduler.page_pool import PagePool
from tpu_serve.scheduler.prefixes import extend_hashes
from tpu_serve.scheduler.scheduler import Scheduler
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import SampledToken, SchedulerOutput, SchedulerStats

MOST_LOADED = 1.5
"""A rank that has a request's beginning cached may hold this many times the tokens of the least loaded one, and some more, and still get it."""
NUM_REMEMBERED = 1024
"""Prompts of which is known to which rank they went, before its cache knows them."""


class DataParallelScheduler:
    """What an engine takes for its scheduler. A request stays on the rank that it is given to.

    That is the rank with most of it in the prefix cache, unless that one is much more loaded than another; otherwise the least loaded one. Load
    is counted in tokens: prompts that wait, and everything that running sequences hold.

    Args:
      ranks: schedulers that are alike.

    Attributes:
      waiting, running: of all ranks, one rank after another.
    """

    def __init__(self, ranks: Seq[Scheduler]):
        self.ranks, first = tuple(ranks), ranks[0]
        self.max_model_len, self.enable_prefix_caching = first.max_model_len, first.enable_prefix_caching
        self.waiting: Collection[Sequence] = _Together([rank.waiting for rank in ranks])
        self.running: Collection[Sequence] = _Together([rank.running for rank in ranks])
        self._rank_of: dict[str, int] = {}
        self._sent: OrderedDict[bytes, int] = OrderedDict()
        self._step_id = 0

    @property
    def max_num_seqs(self) -> int:
        """Of all ranks together. No rank can have more than its share."""
        return sum(rank.max_num_seqs for rank in self.ranks)

    @property
    def max_num_batched_tokens(self) -> int:
        """Likewise."""
        return sum(rank.max_num_batched_tokens for rank in self.ranks)

    def limit_step(self, num_tokens: int) -> None:
        """See `Scheduler.limit_step`.

        Args:
          num_tokens: of each rank.
        """
        for rank in self.ranks:
            rank.limit_step(num_tokens)

    @property
    def cache(self) -> CacheOfRanks:
        return CacheOfRanks(self.ranks)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(rank.num_waiting_tokens for rank in self.ranks)

    @property
    def has_work(self) -> bool:
        return any(rank.has_work for rank in self.ranks)

    @property
    def needs_last_tokens(self) -> bool:
        """See `Scheduler.needs_last_tokens`: one such sequence makes all ranks wait for the step before."""
        return any(rank.needs_last_tokens for rank in self.ranks)

    @property
    def stats(self) -> SchedulerStats:
        """Sums over all ranks, as they are now."""
        total = SchedulerStats()
        for stats in (rank.stats for rank in self.ranks):
            for item in dataclasses.fields(stats):
                mine, value = getattr(total, item.name), getattr(stats, item.name)
                if isinstance(mine, dict):
                    value = {key: mine.get(key, 0) + count for key, count in value.items()}
                else:
                    value += mine
                setattr(total, item.name, value)
        return total

    def add(self, request: Request) -> None:
        """See `Scheduler.add`."""
        if request.id in self._rank_of:
            raise ValueError(f"request id {request.id!r} is in use")
        hashes = self._hashes(request)
        number = self._choose(hashes)
        self.ranks[number].add(request, hashes)
        self._rank_of[request.id] = number
        if hashes:
            self._sent[hashes[-1]] = number
            self._sent.move_to_end(hashes[-1])
            if len(self._sent) > NUM_REMEMBERED:
                self._sent.popitem(last=False)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> TokenOutput | None:
        """See `Scheduler.abort`."""
        number = self._rank_of.pop(request_id, None)
        return None if number is None else self.ranks[number].abort(request_id, reason)

    def reset(self) -> None:
        """See `Scheduler.reset`."""
        self._rank_of.clear()
        self._sent.clear()
        for rank in self.ranks:
            rank.reset()

    def reset_prefix_cache(self) -> bool:
        """See `Scheduler.reset_prefix_cache`."""
        self._sent.clear()
        return all([rank.reset_prefix_cache() for rank in self.ranks])

    def schedule(self) -> SchedulerOutput | None:
        """Plans the next step of all ranks, some of which may have no row in it; None when nobody has one."""
        planned = [rank.schedule() for rank in self.ranks]
        if not any(planned):
            return None
        self._step_id += 1
        parts = tuple(part or SchedulerOutput(self._step_id, (), 0) for part in planned)
        return SchedulerOutput(
            self._step_id,
            tuple(chain.from_iterable(part.scheduled for part in parts)),
            sum(part.num_tokens for part in parts),
            tuple(chain.from_iterable(part.preempted for part in parts)),
            ranks=parts,
        )

    def commit(self, output: SchedulerOutput, sampled: Seq[SampledToken | None]) -> list[TokenOutput]:
        """See `Scheduler.commit`."""
        outputs: list[TokenOutput] = []
        start = 0
        for rank, part in zip(self.ranks, output.ranks, strict=True):
            stop = start + len(part.scheduled)
            outputs += rank.commit(part, sampled[start:stop])
            start = stop
        assert start == len(sampled)
        for one in outputs:
            if one.finish_reason is not None:
                del self._rank_of[one.request_id]
        return outputs

    def check(self) -> None:
        """See `Scheduler.check`."""
        for rank in self.ranks:
            rank.check()
        here = {
            one.request.id: number for number, rank in enumerate(self.ranks) for one in (*rank.waiting, *rank.running)
        }
        assert here == self._rank_of, "a request is not where it was sent"

    # ---- which rank -------------------------------------------------------------------------------------------------

    def _hashes(self, request: Request) -> list[bytes]:
        """Content hashes of the pages that others can share with a request; none where it cannot use any."""
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        hashes: list[bytes] = []
        tokens = request.prompt_token_ids
        extend_hashes(hashes, tokens, len(tokens) - 1, self.cache.page_size, request.cache_salt)
        return hashes

    def _choose(self, hashes: list[bytes]) -> int:
        loads = [rank.num_waiting_tokens + sum(len(one.tokens) for one in rank.running) for rank in self.ranks]
        counts = [len(rank.waiting) + len(rank.running) for rank in self.ranks]
        is_full = [count >= rank.max_num_seqs for count, rank in zip(counts, self.ranks, strict=True)]
        numbers = range(len(self.ranks))
        least = min(numbers, key=lambda one: (is_full[one], loads[one], counts[one], one))
        if not hashes:
            return least
        size = self.cache.page_size
        cached = [rank.cache.match(hashes).num_pages * size for rank in self.ranks]
        if (sent := self._sent.get(hashes[-1])) is not None:  # other choices of the same request, say
            cached[sent] = len(hashes) * size
        most = max(numbers, key=lambda one: (cached[one], -loads[one], -counts[one], -one))
        saved = cached[most] - cached[least]
        limit = MOST_LOADED * loads[least] + saved + self.ranks[most].max_num_batched_tokens
        return most if saved > 0 and is_full[most] <= is_full[least] and loads[most] <= limit else least


AnyScheduler = Scheduler | DataParallelScheduler


class _Together(Collection[Sequence]):
    """Several queues as one. Its length may be asked for while another thread changes them."""

    def __init__(self, parts: Seq[Collection[Sequence]]):
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._parts)

    def __contains__(self, item: Any) -> bool:
        return any(item in part for part in self._parts)


@dataclass(frozen=True, slots=True)
class PoolOfRanks:
    """Pages of one window, of all ranks together; each has an equal share that only its own sequences use."""

    pools: tuple[PagePool, ...]

    @property
    def num_pages(self) -> int:
        return sum(pool.num_pages for pool in self.pools)

    @property
    def num_usable(self) -> int:
        return sum(pool.num_usable for pool in self.pools)

    @property
    def usage(self) -> float:
        return sum(pool.usage for pool in self.pools) / len(self.pools)

    @property
    def page_size(self) -> int:
        return self.pools[0].page_size

    @property
    def window(self) -> int | None:
        return self.pools[0].window

    def most_pages(self, num_tokens: int, most_at_once: int) -> int:
        """See `PagePool.most_pages`."""
        return self.pools[0].most_pages(num_tokens, most_at_once)


@dataclass(frozen=True, slots=True)
class CacheOfRanks:
    """The caches of all ranks, to be looked at."""

    ranks: tuple[Scheduler, ...]

    @property
    def pools(self) -> list[PoolOfRanks]:
        return [PoolOfRanks(pools) for pools in zip(*(rank.cache.pools for rank in self.ranks), strict=True)]

    @property
    def page_size(self) -> int:
        return self.ranks[0].cache.page_size

    @property
    def usage(self) -> float:
        """Share of the pages in use, of those of the window that has fewest left, 0 to 1."""
        return max(pool.usage for pool in self.pools)
