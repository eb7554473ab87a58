"""New rows into the tables of a folder: who replaces whom, and in which order they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan.key import KERNEL, Key, config_from_json, config_to_json
from tpu_serve.moe_plan.lookup import Row
from tpu_serve.tuning_tables.files import locked, read_table, table_path, write_table
from tpu_serve.tuning_tables.table import Table


def least_fused(num_tokens: int, us: float, us_xla: float) -> int:
    """`Entry.min_tokens_fused` of a row whose bucket was measured at its own number of tokens alone: all of it goes the faster way."""
    return num_tokens + 1 if us > us_xla else 0


def distrust(row: Row, jax: str) -> tuple[int, bool]:
    """Lower is more trusted. Of compiled rows those ranked by a schedule are."""
    rank = row.provenance.rank(jax)
    by_bytes = row.provenance.kind == "compiled" and row.provenance.score_kind != "schedule"
    return rank, by_bytes


def merged(held: Iterable[Row], new: Iterable[Row], jax: str) -> tuple[Row, ...]:
    """Both in the order of `_place`. A row replaces the one with its key when it is at least as trusted.

    Args:
      jax: version in use, see `Provenance.rank`.
    """
    rows = {row.key: row for row in held}
    for row in new:
        old = rows.get(row.key)
        if old is None or distrust(row, jax) <= distrust(old, jax):
            rows[row.key] = row
    return tuple(sorted(rows.values(), key=_place))


def _place(row: Row) -> tuple[Any, ...]:
    """Layers together, and of a layer formats, devices and then tokens."""
    layer = dataclasses.asdict(row.key)
    inner = [layer.pop(name) for name in ("format", "num_devices", "num_tokens")]
    return (*("" if value is None else value for value in layer.values()), *inner)


def read(folder: Path, chip: Chip) -> Table[Key, Config]:
    """The chip's table in a folder, an empty one where there is none.

    Raises:
      ConfigError: it makes no sense, see `read_table`.
    """
    path = table_path(folder, chip.name, KERNEL)
    if not path.exists():
        return Table(KERNEL, chip.name, chip.vmem_bytes)
    return read_table(path, Key, config_from_json)


def merge_into(folder: Path, chip: Chip, new: Iterable[Row], jax: str) -> Path:
    """Merges rows into the chip's table in a folder, as it is now. Nothing is written where that changes nothing.

    Raises:
      ConfigError: the table cannot be read or written.
    """
    path = table_path(folder, chip.name, KERNEL)
    with locked(path):  # another process may be doing the same
        table = read(folder, chip)
        entries = merged(table.entries, new, jax)
        if entries != table.entries:
            write_table(path, dataclasses.replace(table, entries=entries), config_to_json)
    return path
