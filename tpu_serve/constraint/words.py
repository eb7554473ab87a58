"""Constraints that need no grammar: a fixed set of ids, and sequences of ids that must not come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpu_serve.constraint.masks import is_allowed, mask_of, whole_mask, without


class AllowedIds:
    """Only these ids, always. Never changes, so it is its own copy. Raises `ValueError` for an id outside the vocabulary."""

    follows = False
    is_finished = False

    def __init__(self, ids: Iterable[int], vocab_size: int):
        self.mask: bytes | None = mask_of(ids, vocab_size)

    def accept(self, token_id: int) -> None:
        if not is_allowed(self.mask, token_id):
            raise ValueError(f"Token {token_id} is not one of the allowed tokens.")

    def copy(self) -> AllowedIds:
        return self


class BannedSequences:
    """The last id of a sequence may not come while the tokens accepted so far end with the ids before it.

    A sequence of one id is never allowed. Tokens of the prompt count for nothing.
    """

    is_finished = False

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int):
        """Raises `ValueError` for an empty sequence and for ids outside the vocabulary."""
        banned = {tuple(sequence) for sequence in sequences}
        if () in banned:
            raise ValueError("A banned sequence must hold at least one token id.")
        mask_of((token_id for sequence in banned for token_id in sequence), vocab_size)  # for its errors
        always = [sequence[0] for sequence in banned if len(sequence) == 1]
        # By the last id that must have come, so that an accepted token looks at few of them.
        self._starts: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *start, last in banned:
            if start:
                self._starts.setdefault(start[-1], []).append((tuple(start), last))
        self._base = without(whole_mask(vocab_size), always)
        self._num_kept = max((len(sequence) for sequence in banned), default=1) - 1
        self._recent: tuple[int, ...] = ()
        self.follows = bool(self._starts)
        self._usual = self._base if always else None
        self.mask: bytes | None = self._usual

    def accept(self, token_id: int) -> None:
        if not is_allowed(self._base if self.mask is None else self.mask, token_id):
            raise ValueError(f"Token {token_id} ends a banned sequence of tokens.")
        if not self.follows:
            return
        self._recent = (*self._recent, token_id)[-self._num_kept :]
        ended = [
            last
            for start, last in self._starts.get(token_id, ())
            if len(start) <= len(self._recent) and self._recent[-len(start) :] == start
        ]
        self.mask = without(self._base, ended) if ended else self._usual

    def copy(self) -> BannedSequences:
        other = object.__new__(BannedSequences)
        other.__dict__.update(self.__dict__)  # nothing in it is changed in place
        return other
