"""Several constraints on one sequence."""

from __future__ import annotations

from tpu_serve.constraint.masks import intersection
from tpu_serve.request import Constraint


def combine(*constraints: Constraint | None) -> Constraint | None:
    """All of them at once: what each allows. None is no constraint, and so is a combination of none."""
    given = [constraint for constraint in constraints if constraint is not None]
    return _All(given) if len(given) > 1 else given[0] if given else None


class _All:
    """Every part takes every token. Finished as soon as one part is."""

    def __init__(self, parts: list[Constraint]):
        self._parts = parts
        self.mask: bytes | None = intersection([part.mask for part in parts])

    @property
    def follows(self) -> bool:
        return any(part.follows for part in self._parts)

    @property
    def is_finished(self) -> bool:
        return any(part.is_finished for part in self._parts)

    def accept(self, token_id: int) -> None:
        followed = self.follows  # a part may stop following with this very token, and allow more from here on
        for part in self._parts:
            part.accept(token_id)
        if followed or self.follows:
            self.mask = intersection([part.mask for part in self._parts])

    def copy(self) -> _All:
        other = object.__new__(_All)
        other._parts, other.mask = [part.copy() for part in self._parts], self.mask
        return other
