"""Pages of the KV cache: who holds them, and which ones hold reusable prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq

PADDING_PAGE = 0
"""Padding rows write here; the page is never handed out."""


def hash_page(parent: bytes, tokens: Seq[int], salt: str) -> bytes:
    """Content hash of a full page: its tokens and, through `parent`, everything before them. The salt enters at the first page."""
    before = parent or b"salt:" + salt.encode(errors="surrogatepass")
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


def most_pages(num_tokens: int, most_at_once: int, page_size: int, window: int | None) -> int:
    """Most pages that a sequence of so many tokens holds at a time.

    Args:
      most_at_once: tokens that a step computes of it.
      window: tokens that a token sees, its own included; None for all.
    """
    whole = -(-num_tokens // page_size)
    if window is None:
        return whole
    # What a chunk needs begins somewhere in a page and ends somewhere in another.
    return min(whole, (window - 1 + most_at_once + page_size - 2) // page_size + 1)


class PagePool:
    """Reference-counted pages with a hash index over full ones.

    A page is *held* (reference count above zero) or *free*. A free page that is still in the index keeps its content and can be taken back
    by `match`; `take` hands out free pages in the order in which they were released, forgetting what they held.

    Args:
      window: tokens that the layers of these pages see, a token's own included; None for all.

    Attributes:
      watched: content hashes of which somebody wants to know when they are entered into the index or leave it.
      num_watched_changes: how often one of them did.

    Raises:
      ValueError: there is no page to hand out.
    """

    def __init__(self, num_pages: int, page_size: int, window: int | None = None):
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (one is for padding), got {num_pages}")
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(1, num_pages))
        self._references = [0] * num_pages
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_pages
        self.watched: Container[bytes] = ()
        self.num_watched_changes = 0

    def first_page(self, start: int) -> int:
        """Index of the first page of a sequence that its token at `start`, or any later one, sees."""
        return 0 if self.window is None else max(0, start - self.window + 1) // self.page_size

    def next_first_page(self, start: int) -> int:
        """The first token behind `start` that sees one page fewer at the beginning. Only where there is a window."""
        assert self.window is not None
        return (self.first_page(start) + 1) * self.page_size + self.window - 1

    def most_pages(self, num_tokens: int, most_at_once: int) -> int:
        """Most pages that a sequence of so many tokens holds at a time, if a step computes at most `most_at_once` of them."""
        return most_pages(num_tokens, most_at_once, self.page_size, self.window)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that sequences can hold at all."""
        return self.num_pages - 1

    @property
    def usage(self) -> float:
        """Share of usable pages that are held, 0 to 1."""
        return 1 - len(self._free) / self.num_usable

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Longest run of leading hashes whose pages are present. Changes nothing: `retain` the pages to hold them."""
        pages = []
        for digest in hashes:
            page = self._by_hash.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_revived(self, pages: Iterable[int]) -> int:
        """How many of these pages are free now, so that retaining them leaves so many fewer to take."""
        return sum(self._references[page] == 0 for page in pages)

    def retain(self, pages: Iterable[int]) -> None:
        """Adds one reference to pages found by `match`."""
        for page in pages:
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1

    def take(self, count: int) -> list[int]:
        """Hands out `count` pages with one reference each.

        Raises:
          IndexError: fewer are free.
        """
        if count > len(self._free):
            raise IndexError(f"{count} pages asked for, {len(self._free)} free")
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Seq[int]) -> None:
        """Drops one reference from each page. Later pages are reused first, so that the beginning of a prefix lives longest."""
        for page in reversed(pages):
            if self._references[page] <= 0:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if self._hash_of[page] is None:
                    self._free.move_to_end(page, last=False)

    def seal(self, page: int, digest: bytes) -> None:
        """Enters a held page, whose content is final, into the index. The first page with some content stays the known one."""
        if self._hash_of[page] is None and digest not in self._by_hash:
            self._by_hash[digest], self._hash_of[page] = page, digest
            self.num_watched_changes += digest in self.watched

    def reset(self) -> bool:
        """Forgets the content of every page that nobody holds; False when some are held, which stay known."""
        for page in self._free:
            self._forget(page)
        return len(self._free) == self.num_usable

    def _forget(self, page: int) -> None:
        digest = self._hash_of[page]
        if digest is not None:
            del self._by_hash[digest]
            self._hash_of[page] = None
            self.num_watched_changes += digest in self.watched

    def check(self, held: Iterable[Seq[int]]) -> None:
        """Checks every invariant against the page lists that sequences hold; for tests and for an idle engine.

        Raises:
          AssertionError: a page leaked, is used twice, or the index is wrong.
        """
        counts = Counter(page for pages in held for page in pages)
        assert PADDING_PAGE not in counts, "the padding page is held"
        for page in range(1, self.num_pages):
            assert self._references[page] == counts[page], (
                f"page {page}: {self._references[page]} references, held {counts[page]} times"
            )
            assert (page in self._free) == (counts[page] == 0), (
                f"page {page} is {'free' if page in self._free else 'not free'}"
            )
        assert {digest: page for page, digest in enumerate(self._hash_of) if digest is not None} == self._by_hash
