"""In which order a phase works: tiles of tokens, the sequences in each, and pieces of what a sequence has cached.

The same order is walked three times at once: by what asks for page tables, by what asks for pages, and by what computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Unit(NamedTuple):
    """A piece of work, scalars: the tile, a sequence that has tokens in it, and a piece of that sequence's keys.

    Attributes:
      first, end: the sequence's tokens in the tile, as indices in T.
      stop: where its tokens end in T, in whichever tile.
      shift: what a token's index in T is less than its position in the sequence.
    """

    tile: Any
    row: Any
    piece: Any
    first: Any
    end: Any
    stop: Any
    shift: Any


@dataclass(frozen=True)
class Walk:
    """The order of the pieces.

    Attributes:
      starts: i32[S + 1] in SMEM, where each sequence's tokens begin in T.
      lengths: i32[S] in SMEM, tokens of each sequence after this step.
      num_rows: S.
      tile: tokens of a tile.
      begin, end: tokens in T that are worked on; `begin` is the first of a sequence whose row has the same number.
      width: tokens of a piece.
      window: see `Problem`.
    """

    starts: Any
    lengths: Any
    num_rows: int
    tile: int
    begin: Any
    end: Any
    width: int
    window: int | None

    def first_unit(self) -> Unit:
        return self._unit(jax.lax.div(self.begin, self.tile), self.begin, self.begin)

    def _unit(self, tile: Any, row: Any, start: Any) -> Unit:
        """The first piece of a sequence in a tile; its tokens begin at `start` in T, in whichever tile."""
        row_in_use = jnp.minimum(row, self.num_rows - 1)
        stop = self.starts[row_in_use + 1]
        first = jnp.maximum(start, tile * self.tile)
        unit = Unit(
            tile, row, 0, first, jnp.minimum(stop, (tile + 1) * self.tile), stop, self.lengths[row_in_use] - stop
        )
        return unit._replace(piece=self.first_piece(unit))

    def exists(self, unit: Unit) -> Any:
        """Whether there is this unit, or the walk has ended before it."""
        return unit.first < self.end

    def first_key(self, unit: Unit) -> Any:
        """Position of the first key that any token of the unit sees."""
        return jnp.int32(0) if self.window is None else jnp.maximum(unit.first + unit.shift - self.window + 1, 0)

    def first_piece(self, unit: Unit) -> Any:
        return jax.lax.div(self.first_key(unit), self.width)

    def is_last_piece(self, unit: Unit) -> Any:
        return unit.piece >= jax.lax.div(unit.end - 1 + unit.shift, self.width)

    def next(self, unit: Unit) -> Unit:
        """The unit behind this one; this one again where the walk has ended."""
        tile_stop, is_last = (unit.tile + 1) * self.tile, self.is_last_piece(unit)
        ends_row = unit.stop <= tile_stop
        row = unit.row + jnp.where(ends_row, 1, 0)
        tile = unit.tile + jnp.where(unit.stop >= tile_stop, 1, 0)
        other = self._unit(tile, row, jnp.where(ends_row, unit.stop, unit.first))
        chosen = [
            jnp.where(is_last, new, old) for new, old in zip(other, unit._replace(piece=unit.piece + 1), strict=True)
        ]
        exists = self.exists(unit)
        return Unit(*(jnp.where(exists, new, old) for new, old in zip(chosen, unit, strict=True)))

    def begins_tile(self, unit: Unit) -> Any:
        """Whether this is the first unit of its tile."""
        first_token = jnp.maximum(unit.tile * self.tile, self.begin)
        return (unit.first <= first_token) & (unit.piece == self.first_piece(unit))

    def ends_tile(self, unit: Unit) -> Any:
        """Whether this is the last unit of its tile."""
        return self.is_last_piece(unit) & (unit.end >= jnp.minimum((unit.tile + 1) * self.tile, self.end))
