"""What was found, as rows of a table, and rows into the tables of a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan.key import KERNEL, Key, config_from_json, config_to_json
from tpu_serve.tuner.trial import MEASURED, SCHEDULE, Trial
from tpu_serve.tuning_tables.files import read_table, table_path, write_table
from tpu_serve.tuning_tables.table import Entry, Provenance, Table

Row = Entry[Key, Config]


def compiled_row(key: Key, config: Config, trial: Trial, routing: str, date: str, jax: str, libtpu: str) -> Row:
    """A row about a config that the compiler accepts. It has no times, whatever its score."""
    provenance = Provenance(
        "compiled", date, jax, libtpu, score=trial.score, score_kind=trial.score_kind, routing=routing
    )
    return Entry(key, config, provenance)


def measured_row(
    key: Key, config: Config, trial: Trial, xla: Trial | None, routing: str, date: str, jax: str, libtpu: str,
    drift: float = 0.0,
) -> Row:  # fmt: skip
    """A row about a config that was measured.

    Args:
      xla: XLA's program measured with the same; None where it cannot run the problem.
      drift: how far the control moved meanwhile, which is the least that the spread is said to be.
    """
    us_xla = None if xla is None else xla.score
    assert trial.score is not None
    assert trial.score_kind == MEASURED
    least = None
    if us_xla is not None:
        least = key.num_tokens + 1 if trial.score > us_xla else 0
    provenance = Provenance(
        MEASURED, date, jax, libtpu, us=trial.score, us_xla=us_xla, iterations=trial.found["iterations"],
        spread=round(max(drift, trial.found["spread"]), 5), routing=routing,
    )  # fmt: skip
    return Entry(key, config, provenance, least)


def distrust(row: Row, jax: str) -> tuple[int, bool]:
    """Lower is more trusted. Of compiled rows those ranked by a schedule are."""
    rank = row.provenance.rank(jax)
    by_bytes = row.provenance.kind == "compiled" and row.provenance.score_kind != SCHEDULE
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
    table, path = read(folder, chip), table_path(folder, chip.name, KERNEL)
    entries = merged(table.entries, new, jax)
    if entries != table.entries:
        write_table(path, dataclasses.replace(table, entries=entries), config_to_json)
    return path
