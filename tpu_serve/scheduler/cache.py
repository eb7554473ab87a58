"""What sequences hold of the device's memory, over all kinds of layers of a model.

Layers that see everything share one pool of pages, layers of one sliding window another. Behind a window pages are given back, and page 0
stands in their place. A recurrent layer keeps its state in the sequence's slot; what the prefix cache can go on from are snapshots of it,
taken where a chunk ends at the end of a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tpu_serve.scheduler.page_pool import PADDING_PAGE, PagePool
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Match:
    """What is cached of the beginning of a sequence.

    Attributes:
      num_pages: leading pages that need not be computed.
      pages: for each pool the pages that those leave to hold, page 0 where none is needed any more.
      snapshot: row of the state at their end, -1 without one.
      num_pages_seen: leading pages whose keys and values are there, though the state may not be.
    """

    num_pages: int
    pages: list[list[int]]
    snapshot: int = -1
    num_pages_seen: int = 0


class Cache:
    """All pools, and the snapshots of recurrent state.

    Args:
      pools: one for each window, in the order of the batch's page tables, with pages of one size.
      snapshots: None for a model without recurrent layers, whose sequences can start anywhere.
    """

    def __init__(self, pools: Seq[PagePool], snapshots: Snapshots | None = None):
        self.pools, self.snapshots, self.page_size = list(pools), snapshots, pools[0].page_size

    @property
    def usage(self) -> float:
        """Share of the pages in use of the fullest pool, 0 to 1."""
        return max(pool.usage for pool in self.pools)

    # ---- room -------------------------------------------------------------------------------------------------------

    def trim(self, sequence: Sequence, start: int) -> None:
        """Gives back the pages that no token from `start` on sees. A launched step may still read them: the device has read what
        it does before a later step writes."""
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            first = min(pool.first_page(start), len(pages))
            behind = []
            for index in range(first - 1, -1, -1):
                if pages[index] == PADDING_PAGE:
                    break
                behind.append(pages[index])
                pages[index] = PADDING_PAGE
            pool.release(behind[::-1])

    def has_room(self, sequence: Sequence, end: int) -> bool:
        """Whether a running sequence can grow to `end` tokens now."""
        num_pages = -(-end // self.page_size)
        return all(
            num_pages - len(pages) <= pool.num_free for pool, pages in zip(self.pools, sequence.pages, strict=True)
        )

    def has_room_for_all(self, ends: Seq[tuple[Sequence, int]]) -> bool:
        """Whether running sequences can grow to these numbers of tokens now, all of them together."""
        for index, pool in enumerate(self.pools):
            missing = sum(max(0, -(-end // self.page_size) - len(sequence.pages[index])) for sequence, end in ends)
            if missing > pool.num_free:
                return False
        return True

    def grow(self, sequence: Sequence, end: int) -> None:
        """Pages for the first `end` tokens; those are there (`has_room`), and what lies behind windows was given back (`trim`).

        Until the sequence has `next_page_event` tokens, decode steps change nothing about its pages: none is full, is needed, or falls behind a
        window.
        """
        num_pages = -(-end // self.page_size)
        event = num_pages * self.page_size
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            if num_pages > len(pages):
                pages += pool.take(num_pages - len(pages))
            if pool.window is not None:
                event = min(event, pool.next_first_page(sequence.num_computed) + 1)
        sequence.next_page_event = event if end >= sequence.num_prompt else 0

    def has_room_for(self, match: Match, num_tokens: int, most_at_once: int, promised: Seq[int]) -> bool:
        """Whether a waiting sequence of so many tokens can be computed to its end, in chunks of at most `most_at_once` tokens.

        Args:
          promised: pages of each pool that are free, but others will take; see `still_to_take`.
        """
        for pool, pages, others in zip(self.pools, match.pages, promised, strict=True):
            kept = [page for page in pages if page != PADDING_PAGE]
            missing = self._missing(pool, pages, num_tokens, most_at_once)
            if missing + pool.num_revived(kept) + others > pool.num_free:
                return False
        return True

    def still_to_take(self, sequences: Iterable[Sequence], most_at_once: int) -> list[int]:
        """For each pool the pages that running sequences need beyond their own until their known tokens are computed."""
        totals = [0] * len(self.pools)
        for sequence in sequences:
            for index, (pool, pages) in enumerate(zip(self.pools, sequence.pages, strict=True)):
                totals[index] += max(0, self._missing(pool, pages, len(sequence.tokens), most_at_once))
        return totals

    def _missing(self, pool: PagePool, pages: Seq[int], num_tokens: int, most_at_once: int) -> int:
        num_gone = sum(page == PADDING_PAGE for page in pages)
        whole = -(-num_tokens // self.page_size) - num_gone
        return min(pool.most_pages(num_tokens, most_at_once), whole) - (len(pages) - num_gone)

    def hold(self, sequence: Sequence, match: Match) -> None:
        """Makes the matched pages those of the sequence."""
        for pool, pages in zip(self.pools, match.pages, strict=True):
            pool.retain(page for page in pages if page != PADDING_PAGE)
        if match.snapshot >= 0 and self.snapshots is not None:
            self.snapshots.use(sequence.page_hashes[match.num_pages - 1])
        sequence.pages = match.pages
        sequence.num_sealed = match.num_pages

    def release(self, sequence: Sequence) -> None:
        """Takes everything that a sequence holds."""
        for pool, pages in zip(self.pools, sequence.pages, strict=True) if sequence.pages else ():
            pool.release([page for page in pages if page != PADDING_PAGE])
        sequence.pages, sequence.num_sealed, sequence.next_page_event = [], 0, 0
        if self.snapshots is not None:
            self.snapshots.leave(sequence)

    # ---- prefixes ---------------------------------------------------------------------------------------------------

    def nothing(self) -> Match:
        """The match of a sequence that starts from its first token."""
        return Match(0, [[] for _ in self.pools])

    def match(self, hashes: Seq[bytes]) -> Match:
        """The longest beginning that can be gone on from. Changes nothing: `hold` it."""
        seen = len(hashes)
        runs = []  # for each window: pages in a row that are there up to and with each page
        for pool in self.pools:
            if pool.window is None:
                seen = min(seen, len(pool.match(hashes)))
        for pool in self.pools:
            run = [0]
            for digest in hashes[:seen] if pool.window is not None else ():
                run.append(run[-1] + 1 if pool.match((digest,)) else 0)
            runs.append(run)
        num_seen = 0
        for count in range(seen, 0, -1):
            if all(
                pool.window is None or count - pool.first_page(count * self.page_size) <= run[count]
                for pool, run in zip(self.pools, runs, strict=True)
            ):
                num_seen = num_seen or count
                snapshot = -1 if self.snapshots is None else self.snapshots.find(hashes[count - 1])
                if self.snapshots is None or snapshot >= 0:
                    return Match(count, [self._matched(pool, hashes, count) for pool in self.pools], snapshot, num_seen)
        return Match(0, [[] for _ in self.pools], num_pages_seen=num_seen)

    def watch(self, hashes: frozenset[bytes]) -> None:
        """Counts from now on what becomes of these in `num_watched_changes`."""
        for pool in self.pools:
            pool.watched = hashes
        if self.snapshots is not None:
            self.snapshots.watched = hashes

    @property
    def num_watched_changes(self) -> list[int]:
        """Of all pools and of the snapshots: while they stay what they are, so does what `match` finds of the hashes watched."""
        snapshots = [] if self.snapshots is None else [self.snapshots.num_watched_changes]
        return [*(pool.num_watched_changes for pool in self.pools), *snapshots]

    def _matched(self, pool: PagePool, hashes: Seq[bytes], count: int) -> list[int]:
        first = pool.first_page(count * self.page_size)
        return [PADDING_PAGE] * first + pool.match(hashes[first:count])

    def seal(self, sequence: Sequence, hashes: Seq[bytes]) -> None:
        """Offers the leading pages, full and computed, of which these are the hashes."""
        for pool, pages in zip(self.pools, sequence.pages, strict=True):
            for index in range(sequence.num_sealed, len(hashes)):
                if pages[index] != PADDING_PAGE:
                    pool.seal(pages[index], hashes[index])
        sequence.num_sealed = len(hashes)

    def reset(self) -> bool:
        """Forgets every cached prefix that nobody holds; False when some pages are held, which stay known."""
        if self.snapshots is not None:
            self.snapshots.reset()
        return all([pool.reset() for pool in self.pools])

    def emptied(self) -> Cache:
        """A new one of the same size that knows nothing."""
        pools = [PagePool(pool.num_pages, pool.page_size, pool.window) for pool in self.pools]
        return Cache(pools, None if self.snapshots is None else Snapshots(self.snapshots.num_rows))

    def check(self, holders: Iterable[Sequence]) -> None:
        """Checks every invariant against what sequences hold; for tests and for an idle engine.

        Raises:
          AssertionError: something leaked, is held twice or is not found again.
        """
        holders = list(holders)
        for index, pool in enumerate(self.pools):
            pool.check([[page for page in one.pages[index] if page != PADDING_PAGE] for one in holders if one.pages])
        if self.snapshots is not None:
            self.snapshots.check(holders)
