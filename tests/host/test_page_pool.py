"""The page pool against a model that only remembers who holds what, what was sealed, and when it was released."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tpu_serve.scheduler.page_pool import PADDING_PAGE, PagePool, hash_page

DIGESTS = st.sampled_from([bytes([letter]) for letter in b"abcdefgh"])


class PagePoolMachine(RuleBasedStateMachine):
    """Holders take, match, seal and release at random."""

    @initialize(num_pages=st.integers(2, 10))
    def make(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, page_size=4)
        self.usable = set(range(num_pages)) - {PADDING_PAGE}
        self.holders: list[list[int]] = []
        self.known: dict[bytes, int] = {}
        self.released_at: dict[int, tuple[int, int]] = {}
        self.clock = 0

    # ---- the model --------------------------------------------------------------------------------------------------

    def held(self) -> set[int]:
        return {page for pages in self.holders for page in pages}

    def expect_handed_out(self, pages: list[int], free: set[int]) -> None:
        """Unsealed pages come in any order; then the cached ones, the longest released first."""
        cached = sorted(free & set(self.known.values()), key=self.released_at.__getitem__)
        num_plain = min(len(pages), len(free) - len(cached))
        assert set(pages[:num_plain]) <= free - set(cached)
        assert pages[num_plain:] == cached[: len(pages) - num_plain]
        assert len(set(pages)) == len(pages)

    def expect_match(self, digests: list[bytes]) -> list[int]:
        present = [self.known.get(digest) for digest in digests]
        return present[: present.index(None)] if None in present else present

    # ---- what can happen --------------------------------------------------------------------------------------------

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        free = self.usable - self.held()
        if count > len(free):
            with pytest.raises(IndexError, match=f"{count} pages asked for, {len(free)} free"):
                self.pool.take(count)
            return
        pages = self.pool.take(count)
        assert len(pages) == count
        self.expect_handed_out(pages, free)
        self.known = {digest: page for digest, page in self.known.items() if page not in pages}
        self.holders.append(pages)

    @rule(digests=st.lists(DIGESTS, max_size=4, unique=True))
    def match(self, digests: list[bytes]) -> None:
        pages = self.pool.match(digests)
        assert pages == self.expect_match(digests)
        free = self.usable - self.held()
        assert self.pool.num_revived(pages) == len(set(pages) & free)
        self.pool.retain(pages)
        self.holders.append(pages)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), digest=DIGESTS)
    def seal(self, data: st.DataObject, digest: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.seal(page, digest)
        if digest not in self.known and page not in self.known.values():
            self.known[digest] = page

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)
        self.clock += 1
        for index, page in enumerate(pages):
            self.released_at[page] = (self.clock, -index)

    @rule(data=st.data())
    def release_what_nobody_holds(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted((self.usable - self.held()) | {PADDING_PAGE})))
        with pytest.raises(ValueError, match=f"page {page} is released more often than it was taken"):
            self.pool.release([page])

    @rule()
    def reset(self) -> None:
        held = self.held()
        assert self.pool.reset() == (not held)
        self.known = {digest: page for digest, page in self.known.items() if page in held}

    @invariant()
    def agrees(self) -> None:
        held = self.held()
        self.pool.check(self.holders)
        assert self.pool.num_free == len(self.usable - held)
        assert self.pool.usage == pytest.approx(len(held) / len(self.usable))
        for digest in [bytes([letter]) for letter in b"abcdefgh"]:
            assert self.pool.match([digest]) == self.expect_match([digest])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for pages in self.holders:
                self.pool.release(pages)
            self.pool.check([])
            assert self.pool.usage == 0
            assert set(self.pool.take(len(self.usable))) == self.usable


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)


def test_a_pool_of_only_the_padding_page_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1, 16)


def test_the_padding_page_is_never_handed_out() -> None:
    pool = PagePool(5, 16)
    assert PADDING_PAGE not in pool.take(4)
    assert pool.num_free == 0


def test_the_beginning_of_a_prefix_is_evicted_last() -> None:
    pool = PagePool(4, 16)
    pages = pool.take(3)
    for page, digest in zip(pages, (b"0", b"1", b"2"), strict=True):
        pool.seal(page, digest)
    pool.release(pages)
    pool.take(1)
    assert pool.match([b"0", b"1", b"2"]) == pages[:2]
    pool.take(1)
    assert pool.match([b"0", b"1", b"2"]) == pages[:1]


def test_a_cached_page_that_is_used_again_becomes_the_youngest() -> None:
    pool = PagePool(3, 16)
    first, second = pool.take(2)
    pool.seal(first, b"first")
    pool.seal(second, b"second")
    pool.release([first])
    pool.release([second])
    pool.retain([first])
    pool.release([first])
    assert pool.take(1) == [second]


def test_of_two_pages_with_one_content_the_first_stays_known() -> None:
    pool = PagePool(3, 16)
    first, second = pool.take(2)
    pool.seal(first, b"same")
    pool.seal(second, b"same")
    pool.release([first, second])
    assert pool.match([b"same"]) == [first]
    assert pool.take(1) == [second]


def test_a_release_of_too_much_is_refused() -> None:
    pool = PagePool(3, 16)
    (page,) = pool.take(1)
    pool.release([page])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([page])
    pool.check([])


@pytest.mark.parametrize("held", [[[1]], [[1, 2], [2]], [[1, 2, PADDING_PAGE]], []])
def test_check_finds_pages_that_are_held_by_nobody_or_by_too_many(held: list[list[int]]) -> None:
    pool = PagePool(4, 16)
    assert sorted(pool.take(2)) == [1, 2]
    pool.check([[1, 2]])
    with pytest.raises(AssertionError):
        pool.check(held)


def test_a_hash_names_the_tokens_everything_before_them_and_the_salt() -> None:
    first = hash_page(b"", [1, 2], "")
    others = [
        hash_page(b"", [2, 1], ""),
        hash_page(b"", [1, 2], "salt"),
        hash_page(first, [1, 2], ""),
        hash_page(hash_page(b"", [2, 1], ""), [1, 2], ""),
        hash_page(hash_page(b"", [1, 2], "salt"), [1, 2], ""),
    ]
    assert hash_page(b"", [1, 2], "") == first
    assert len({first, *others}) == 6


def test_any_text_may_be_a_salt() -> None:
    """JSON can bring half of a surrogate pair, which UTF-8 cannot hold."""
    assert hash_page(b"", [1], "\ud800") != hash_page(b"", [1], "\udfff")
