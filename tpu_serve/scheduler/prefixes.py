"""How sequences use the prefix cache: what they find in it, what they offer it, and where chunks must end for that."""

from __future__ import annotations

from tpu_serve.scheduler.cache import Cache, Match
from tpu_serve.scheduler.page_pool import hash_page
from tpu_serve.scheduler.sequence import Sequence


class Prefixes:
    """Beginnings of sequences in a cache.

    Args:
      enabled: look for and offer equal beginnings; otherwise every sequence is computed whole.
    """

    def __init__(self, cache: Cache, enabled: bool):
        self._cache, self._enabled = cache, enabled

    def may_read(self, sequence: Sequence) -> bool:
        """Whether cached tokens serve the sequence: log-probabilities of prompt tokens come from computing them."""
        return self._enabled and sequence.prompt_logprobs is None

    def match(self, sequence: Sequence) -> Match:
        """What is cached of the sequence. All of its tokens are known."""
        if not self.may_read(sequence):
            return self._cache.nothing()
        return self._cache.match(self._hashes(sequence, len(sequence.tokens) - 1))

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

    def take_snapshot(self, sequence: Sequence, end: int) -> int:
        """A row for the recurrent state after so many tokens, -1 for none."""
        if not self._takes_snapshots or end % self._cache.page_size:
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
        for page in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else b""
            hashes.append(
                hash_page(parent, sequence.tokens[page * size : (page + 1) * size], sequence.request.cache_salt)
            )
        return hashes[: num_tokens // size]
