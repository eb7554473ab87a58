"""An answer that has a form, unless it turns out to be something else at its first token."""

from __future__ import annotations

from tpu_serve.constraint.masks import mask_of, union
from tpu_serve.request import Constraint


class UnlessStartedWith:
    """The answer is what `inner` allows, or begins with the token `start_id` and is free from there on."""

    def __init__(self, inner: Constraint, start_id: int, *, vocab_size: int):
        """Owns `inner`. Raises `ValueError` for an id outside the vocabulary."""
        self._inner, self._start_id = inner, start_id
        self._start_mask = mask_of([start_id], vocab_size)
        self._is_first, self._is_free = True, False

    @property
    def follows(self) -> bool:
        return self._is_first or (not self._is_free and self._inner.follows)

    @property
    def mask(self) -> bytes | None:
        if self._is_free:
            return None
        mask = self._inner.mask
        if not self._is_first or mask is None:
            return mask
        return union(mask, self._start_mask)

    @property
    def is_finished(self) -> bool:
        return not self._is_first and not self._is_free and self._inner.is_finished

    def accept(self, token_id: int) -> None:
        if self._is_free:
            return
        if self._is_first and token_id == self._start_id:
            self._is_free = True
        else:
            self._inner.accept(token_id)
        self._is_first = False

    def copy(self) -> UnlessStartedWith:
        other = object.__new__(UnlessStartedWith)
        other.__dict__.update(self.__dict__)
        other._inner = self._inner.copy()
        return other
