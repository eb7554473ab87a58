"""Constraints on models that reason before they answer. Marks are sequences of token ids, mostly of one id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpu_serve.constraint.masks import mask_of, union, whole_mask, without
from tpu_serve.request import Constraint

_FAR = 8
"""More tokens than are ever launched without being known to the host."""


class _Mark:
    """Looks for a sequence of ids in a stream of them: `num_seen` of its ids are the end of what has come."""

    def __init__(self, ids: Sequence[int]):
        if not ids:
            raise ValueError("A mark must hold at least one token id.")
        self.ids, self.num_seen = tuple(ids), 0

    @property
    def is_seen(self) -> bool:
        return self.num_seen == len(self.ids)

    def see(self, token_id: int) -> None:
        come = (*self.ids[: self.num_seen], token_id)
        self.num_seen = next(n for n in range(len(come), -1, -1) if come[len(come) - n :] == self.ids[:n])

    def copy(self) -> _Mark:
        other = _Mark(self.ids)
        other.num_seen = self.num_seen
        return other


class AfterReasoning:
    """`inner` begins once `end_ids` have come; before, everything is allowed but the end of the sequence.

    With `start_ids` reasoning is not open yet: the answer may begin with them, or with what `inner` allows and is the answer then.
    """

    follows = True

    def __init__(
        self,
        inner: Constraint,
        end_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        start_ids: Sequence[int] = (),
    ):
        """Owns `inner`. Raises `ValueError` for empty `end_ids` and for ids outside the vocabulary."""
        mask_of([*end_ids, *start_ids], vocab_size)  # for its errors
        self._inner, self._end = inner, _Mark(end_ids)
        self._free = without(whole_mask(vocab_size), eos_token_ids)
        self._to_come = tuple(start_ids)
        self._is_inside, self._is_begun = True, False
        self._vocab_size = vocab_size
        self.mask: bytes | None = None
        self._look()

    @property
    def is_finished(self) -> bool:
        return not self._is_inside and self._inner.is_finished

    def accept(self, token_id: int) -> None:
        if not self._is_inside:
            self._inner.accept(token_id)
        elif not self._to_come:
            self._end.see(token_id)
            self._is_inside = not self._end.is_seen
        elif token_id == self._to_come[0]:
            self._to_come, self._is_begun = self._to_come[1:], True
        elif self._is_begun:
            raise ValueError(f"Token {token_id} does not continue the start of the reasoning.")
        else:
            self._is_inside = False
            self._inner.accept(token_id)
        self._look()

    def copy(self) -> AfterReasoning:
        other = object.__new__(AfterReasoning)
        other.__dict__.update(self.__dict__)
        other._inner, other._end = self._inner.copy(), self._end.copy()
        return other

    def _look(self) -> None:
        if not self._is_inside:
            self.mask = self._inner.mask
        elif not self._to_come:
            self.mask = self._free
        else:
            self.mask = mask_of(self._to_come[:1], self._vocab_size)
            if not self._is_begun:
                self.mask = None if self._inner.mask is None else union(self.mask, self._inner.mask)


class ThinkingBudget:
    """After `num_tokens` tokens of reasoning only the sequence that ends it may come; once it has ended, everything may.

    Counted are the tokens after the start of reasoning, those of its end not. A part of the end that has come already is not repeated.
    """

    is_finished = False

    def __init__(
        self,
        num_tokens: int,
        end_ids: Sequence[int],
        already_open: bool,
        *,
        vocab_size: int,
        start_ids: Sequence[int] = (),
    ):
        """`start_ids` open the reasoning where it is not `already_open`; without them it is open from the first token.

        Raises `ValueError` for a negative number, empty `end_ids` and ids outside the vocabulary.
        """
        if num_tokens < 0:
            raise ValueError(f"A budget of reasoning must not be negative, got {num_tokens}.")
        mask_of([*end_ids, *start_ids], vocab_size)  # for its errors
        self._num_left, self._vocab_size = num_tokens, vocab_size
        self._end = _Mark(end_ids)
        self._start = _Mark(start_ids) if start_ids and not already_open else None
        self.mask: bytes | None = None
        self._look()

    @property
    def follows(self) -> bool:
        # Far from the end of the budget no token changes the mask soon, and steps may be launched ahead. What has come of the end
        # counts as reasoning after all when it is not continued.
        return not self._end.is_seen and self._num_left - self._end.num_seen < _FAR

    def accept(self, token_id: int) -> None:
        if self._end.is_seen:
            return
        if self._start is not None:
            self._start.see(token_id)
            if self._start.is_seen:
                self._start = None
        else:
            if self.mask is not None and token_id != self._end.ids[self._end.num_seen]:
                raise ValueError(f"Token {token_id} does not end the reasoning, whose budget is spent.")
            num_seen = self._end.num_seen
            self._end.see(token_id)
            self._num_left -= num_seen + 1 - self._end.num_seen
        self._look()

    def copy(self) -> ThinkingBudget:
        other = object.__new__(ThinkingBudget)
        other.__dict__.update(self.__dict__)
        other._end, other._start = self._end.copy(), self._start.copy() if self._start else None
        return other

    def _look(self) -> None:
        forced = not self._end.is_seen and self._start is None and self._num_left <= 0
        self.mask = mask_of([self._end.ids[self._end.num_seen]], self._vocab_size) if forced else None
