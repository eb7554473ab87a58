"""Which values share a scale, from the shapes of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales of a weight [..., O, N].

    Attributes:
      block: (rows, columns) that share a scale.
      shape: of the scales, with as many dimensions as the weight.
      words: for people.
    """

    block: tuple[int, int]
    shape: tuple[int, ...]
    words: str


def grids(
    shape: tuple[int, ...], blocks: Sequence[tuple[int, int]], group_sizes: Sequence[int]
) -> list[tuple[tuple[int, ...], Grid]]:
    """(shape in the file, what it means) of all the scales that a weight may have, those that a config names first.

    Args:
      shape: [O, N], or [E, O, N] where each expert has scales of its own.
      blocks, group_sizes: that the config names.
    """
    *stack, outputs, inputs = shape
    leading = tuple(stack)
    found: list[tuple[tuple[int, ...], Grid]] = []
    for rows, columns in blocks:
        scales = (*leading, -(-outputs // rows), -(-inputs // columns))
        found.append((scales, Grid((rows, columns), scales, f"blocks of {rows}x{columns}")))
    for size in group_sizes:
        scales = (*leading, outputs, -(-inputs // size))
        found.append((scales, Grid((1, size), scales, f"groups of {size}")))
    channels = Grid((1, inputs), (*leading, outputs, 1), "a scale per output channel")
    found.append((channels.shape, channels))
    whole = Grid((outputs, inputs), (*leading, 1, 1), "a scale per expert" if leading else "a scale per tensor")
    found += [((*leading, *ones), whole) for ones in ((), (1,), (1, 1))]
    if not leading:
        found.append(((outputs,), channels))
    return found


def find_grid(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    blocks: Sequence[tuple[int, int]],
    group_sizes: Sequence[int],
) -> Grid | None:
    """What scales of a shape mean, or None where they cannot be those of the weight."""
    return next((grid for form, grid in grids(shape, blocks, group_sizes) if form == scale_shape), None)
