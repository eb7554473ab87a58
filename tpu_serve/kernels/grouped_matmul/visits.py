"""Which row tile meets which group: the tables that a grouped product reads from scalar memory, made by XLA before it.

A *visit* is a row tile and a group that have rows in common. Visits lie in the order of rows, so those of a tile and those of a group are
consecutive. V is how many the tables hold, E the groups that have matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """Attributes: tables of a call.

    tile, group: i32[V], of each visit. Behind the last visit nothing is meant by any table.
    begin, end: i32[V], the group's rows of the tile, counted within the tile.
    ordinal: i32[V], the group's place among those with rows.
    active: i32[E], the groups with rows in order, then anything.
    counts: i32[2], visits (at least one, with no rows if there are none) and groups with rows.
    """

    tile: jax.Array
    group: jax.Array
    begin: jax.Array
    end: jax.Array
    ordinal: jax.Array
    active: jax.Array
    counts: jax.Array


def group_bounds(
    group_sizes: jax.Array, group_offset: jax.Array | int, experts: int, rows: int
) -> tuple[jax.Array, jax.Array]:
    """First row and row behind the last, i32[E] each, of the groups from `group_offset` on; none lies behind the last of all rows."""
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = jnp.asarray(group_offset, jnp.int32)
    return (
        jax.lax.dynamic_slice_in_dim(starts, first, experts),
        jax.lax.dynamic_slice_in_dim(ends, first, experts),
    )


def own_rows(group_sizes: jax.Array, group_offset: jax.Array | int, experts: int, rows: int) -> jax.Array:
    """bool[R, 1]: whether a row is in one of the groups that have matrices."""
    starts, ends = group_bounds(group_sizes, group_offset, experts, rows)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return (row >= starts[0]) & (row < ends[-1])


def list_visits(
    group_sizes: jax.Array,
    group_offset: jax.Array | int,
    *,
    experts: int,
    rows: int,
    tile_rows: int,
    length: int,
    with_empty: bool,
) -> Visits:
    """The tables. No sort, gather or scatter: comparisons of every visit with every group, and sums.

    Args:
      group_sizes: i32[E_all], rows of each group from row 0 on.
      group_offset: group of the first matrix.
      length: V, enough for every case.
      with_empty: a group without rows has a visit too, with no rows, so that something can be written for it.
    """
    starts, ends = group_bounds(group_sizes, group_offset, experts, rows)
    has_rows = ends > starts
    first_tile = jnp.minimum(starts, rows - 1) // tile_rows
    count = jnp.where(has_rows, (ends - 1) // tile_rows - first_tile + 1, int(with_empty))
    after = jnp.cumsum(count, dtype=jnp.int32)
    before = after - count
    number = jnp.arange(length, dtype=jnp.int32)[:, None]
    chosen = (number >= before) & (number < after)  # [V, E], one group at most

    def of_visit(table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, table, 0), axis=1, dtype=jnp.int32)

    index = jnp.arange(experts, dtype=jnp.int32)
    place = jnp.cumsum(has_rows, dtype=jnp.int32) - 1
    at_place = has_rows & (place == index[:, None])  # [place, group]
    tile = of_visit(first_tile + number - before)
    return Visits(
        tile=tile,
        group=of_visit(index),
        begin=jnp.maximum(of_visit(starts) - tile * tile_rows, 0),
        end=jnp.minimum(of_visit(ends) - tile * tile_rows, tile_rows),
        ordinal=of_visit(jnp.maximum(place, 0)),
        active=jnp.sum(jnp.where(at_place, index, 0), axis=1, dtype=jnp.int32),
        counts=jnp.stack([jnp.maximum(after[-1], 1), place[-1] + 1]),
    )
