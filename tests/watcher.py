"""A constraint for tests of what the engine does with one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Watcher:
    """A constraint that allows everything, and remembers what it was told.

    Attributes:
      finishes, fails: it is finished after so many tokens, or refuses one with that number, from 1; 0 for never.
    """

    follows: bool
    finishes: int = 0
    fails: int = 0
    seen: list[int] = field(default_factory=list)
    mask: bytes | None = None

    @property
    def is_finished(self) -> bool:
        return 0 < self.finishes <= len(self.seen)

    def accept(self, token_id: int) -> None:
        assert not self.is_finished
        if len(self.seen) + 1 == self.fails:
            raise ValueError(f"number {self.fails} is refused")
        self.seen.append(token_id)

    def copy(self) -> Watcher:
        return Watcher(self.follows, self.finishes, self.fails, list(self.seen))
