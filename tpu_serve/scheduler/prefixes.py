"""How sequences use the prefix cache: what they find in it, what they offer it, and where chunks must end for that."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tpu_serve.scheduler.cache import Cache, Match
from tpu_serve.scheduler.page_pool import hash_page
from tpu_serve.scheduler.sequence import Sequence


def snapshot_end(end: int, page_size: int) -> int:
    """After how many tokens a launch of several steps, with `end` tokens once it has run, keeps recurrent state if it does."""
    return end // page_size * page_size


def extend_hashes(hashes: list[bytes], tokens: Seq[int], num_tokens: int, page_size: int, salt: str) -> None:
    """Adds content hashes until there is one for each full page among the first `num_tokens` tokens."""
    for page in range(len(hashes), num_tokens // page_size):
        parent = hashes[-1] if hashes else b""
        hashes.append(hash_page(parent, tokens[page * page_size : (page + 1) * page_size], salt))


class Prefixes:
    """Beginnings of sequences in a cache.

    Args:
      enabled: look for and offer equal beginnings; otherwise every sequence is computed whole.
    """

    def __init__(self, cache: Cache, enabled: bool):
        self._cache, self._enabled = cache, enabled
        self._remembered: tuple[Sequence, int, list[int], Match] | None = None

    def may_read(self, sequence: Sequence) -> bool:
        """Whether cached tokens serve the sequence: log-probabilities of prompt tokens come from computing them."""
        return self._enabled and sequence.prompt_logprobs is None

    def match(self, sequence: Sequence) -> Match:
        """What is cached of the sequence, whose tokens are all known. The caller takes it over: `hold` it, or `remember` it."""
        if not self.may_read(sequence):
            return self._cache.nothing()
        remembered, self._remembered = self._remembered, None
        if remembered is not None:
            whose, num_tokens, changes, match = remembered
            if whose is sequence and num_tokens == len(sequence.tokens) and changes == self._cache.num_watched_changes:
                return match
        return self._cache.match(self._hashes(sequence, len(sequence.tokens) - 1))

    def remember(self, sequence: Sequence, match: Match) -> None:
        """Has `match` find the same again as long as nothing is entered or forgotten that the sequence could share: it waits, and is asked for in
        every step."""
        if self.may_read(sequence):
            self._cache.watch(frozenset(sequence.page_hashes))
            self._remembered = sequence, len(sequence.tokens), self._cache.num_watched_changes, match

    def chunk(self, sequence: Sequence, length: int) -> int:
        """How many of the next `length` tokens to compute now. Recurrent state can be gone on from only where a chunk ended at the end of a
        page, so one ends at the last page of a prompt, where the cache has seen prompts part ways, and wherever it is cut short."""
        if not self._takes_snapshots:
            return length
        start, size, num_known = sequence.num_computed, self._cache.page_size, len(sequence.tokens)
        end = start + length
        if end < num_known and end // size * size > start:
            end = end // size * size
        last = (num_known - 1) // size * size
        return min(cut for cut in (end, sequence.branch, last) if start < cut <= end) - start

    def take_snapshot(self, sequence: Sequence, start: int, end: int, num_steps: int = 1) -> int:
        """A row for the recurrent state after `end` tokens, -1 for none: that is at the end of a page only. Of several steps, which compute a
        token each, it is the state after the last one that ends at `snapshot_end`."""
        if not self._takes_snapshots:
            return -1
        if num_steps > 1:
            end = snapshot_end(end, self._cache.page_size)
        if end % self._cache.page_size or end <= start:
            return -1
        assert self._cache.snapshots is not None
        last = (len(sequence.tokens) - 1) // self._cache.page_size * self._cache.page_size
        is_passing = end > sequence.num_prompt or end not in (sequence.branch, last)
        return self._cache.snapshots.take(sequence, end, is_passing)

    def seal(self, sequence: Sequence) -> None:
        """Offers the pages that are full of known and computed tokens."""
        num_tokens = min(sequence.num_computed, len(sequence.tokens))
        if num_tokens // self._cache.page_size == sequence.num_sealed or not self._enabled:
            return
        hashes = self._hashes(sequence, num_tokens)
        self._cache.seal(sequence, hashes)
        if self._cache.snapshots is not None:
            self._cache.snapshots.seal(sequence, hashes, self._cache.page_size)

    @property
    def _takes_snapshots(self) -> bool:
        return self._enabled and self._cache.snapshots is not None and self._cache.snapshots.num_rows > 0

    def _hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Content hashes of the full pages among the first `num_tokens` tokens, which must be known."""
        size, hashes = self._cache.page_size, sequence.page_hashes
        extend_hashes(hashes, sequence.tokens, num_tokens, size, sequence.request.cache_salt)
        return hashes[: num_tokens // size]
