"""Rows of the device's recurrent state that hold what some prefix left behind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tpu_serve.scheduler.sequence import Sequence


@dataclass(slots=True)
class _Pending:
    """A row that a launched step fills, and how many tokens its state has seen. Their content may not be known yet."""

    row: int
    num_tokens: int
    is_passing: bool


class Snapshots:
    """Rows by the content hash of the last page that their state has seen; the one not used for longest gives way.

    A snapshot is found from the step after the one that writes it on: within a step every sequence reads its state before any is written. A
    row that is found may be given away in the same step for that reason too.

    Of the boundaries that a sequence passes, in its answer or between the chunks of a long prompt, only the newest is kept: the next turn of a
    conversation goes on from there. One long prompt or answer would otherwise push out what all others left.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        self.watched: Container[bytes] = ()  # see `PagePool`
        self.num_watched_changes = 0
        self._pending: dict[Sequence, _Pending] = {}
        self._passing: dict[Sequence, bytes] = {}
        self._fresh: list[tuple[bytes, int]] = []

    def reset(self) -> None:
        """Forgets every snapshot that no sequence is about to write."""
        self.settle()
        for digest in list(self._by_hash):
            self._free.append(self._forget(digest))

    def settle(self) -> None:
        """What the steps launched so far have written can be found from now on."""
        for digest, row in self._fresh:
            if digest in self._by_hash:
                self._free.append(row)
            else:
                self._by_hash[digest] = row
                self.num_watched_changes += digest in self.watched
        self._fresh.clear()

    def find(self, digest: bytes) -> int:
        """Row of a snapshot, -1 if there is none. Changes nothing: `use` it."""
        return self._by_hash.get(digest, -1)

    def use(self, digest: bytes) -> None:
        """A sequence starts from this snapshot."""
        self._by_hash.move_to_end(digest)

    def take(self, sequence: Sequence, num_tokens: int, is_passing: bool) -> int:
        """A row for the state after so many tokens, -1 where there is none to have."""
        if sequence in self._pending:
            return -1
        if not self._free and self._by_hash:
            self._free.append(self._forget(next(iter(self._by_hash))))
        if not self._free:
            return -1
        row = self._free.pop()
        self._pending[sequence] = _Pending(row, num_tokens, is_passing)
        return row

    def seal(self, sequence: Sequence, hashes: Seq[bytes], page_size: int) -> None:
        """Enters the snapshot that a sequence waits for, once the content of its pages is known."""
        pending = self._pending.get(sequence)
        if pending is None or pending.num_tokens > len(hashes) * page_size:
            return
        del self._pending[sequence]
        digest = hashes[pending.num_tokens // page_size - 1]
        self._fresh.append((digest, pending.row))
        if pending.is_passing:
            older = self._passing.get(sequence)
            if older is not None and older in self._by_hash:
                self._free.append(self._forget(older))
            self._passing[sequence] = digest

    def _forget(self, digest: bytes) -> int:
        self.num_watched_changes += digest in self.watched
        return self._by_hash.pop(digest)

    def leave(self, sequence: Sequence) -> None:
        """A sequence stops running; what it waits for is never known."""
        self._passing.pop(sequence, None)
        pending = self._pending.pop(sequence, None)
        if pending is not None:
            self._free.append(pending.row)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raises AssertionError where a row leaked or is held twice, or a sequence that is gone still holds one."""
        pending = [one.row for one in self._pending.values()]
        rows = [*self._free, *self._by_hash.values(), *pending, *(row for _, row in self._fresh)]
        assert sorted(rows) == list(range(self.num_rows)), "rows of state leaked or are held twice"
        assert {*self._pending, *self._passing} <= set(holders), "somebody who is gone still holds state"
