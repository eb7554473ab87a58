"""Which of the paths in XLA's own operations runs so many tokens: by what the tuner measured on a CPU, else by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.key import Key, key_of
from tpu_serve.tuning_tables.files import read_tables
from tpu_serve.tuning_tables.table import Entry
from tpu_serve.tuning_tables.typed import Malformed, from_json

TABLE = "experts"
"""Name of the file beside those of kernels."""

PORTABLE = ("dense", "ragged", "gathered")

MOST_GATHERED_TOKENS = 16
"""As many rows as `Ragged` has in a block: up to here a block holds every token of its expert, and sorting them is work for nothing."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a row says: the fastest of `PORTABLE`."""

    path: str

    def __post_init__(self) -> None:
        if self.path not in PORTABLE:
            raise ValueError(f"path must be one of {', '.join(PORTABLE)}, not {self.path!r}")


PortableRow = Entry[Key, Chosen]


def chosen_from_json(value: Any, where: str) -> Chosen:
    """A row's value.

    Raises:
      Malformed: it is none.
    """
    if not isinstance(value, dict):
        raise Malformed(f"{where} must be an object, not a {type(value).__name__}")
    return from_json(Chosen, value, where)


def chosen_to_json(chosen: Chosen) -> dict[str, Any]:
    return {"path": chosen.path}


def portable_rows(chip: str, folders: Sequence[Path] = (), *, jax: str = "", host: str = "") -> dict[Key, PortableRow]:
    """Rows of a chip that were measured with this minor version of JAX and hold on this host, those of `folders` first.

    Raises:
      ConfigError: a file is damaged, or a folder is not there.
    """
    found: dict[Key, PortableRow] = {}
    for table in read_tables(chip, TABLE, folders, Key, chosen_from_json):
        for row in table.entries:
            known = row.provenance
            if known.host in ("", host) and known.kind == "measured" and known.rank(jax) == 0:
                found.setdefault(row.key, row)
    return found


def portable(num_tokens: int, *, is_tpu: bool = False) -> str:
    """The path of so many tokens where nobody measured."""
    return "gathered" if num_tokens <= MOST_GATHERED_TOKENS and not is_tpu else "ragged"


def choose_portable(problem: Problem, rows: Mapping[Key, PortableRow], *, is_tpu: bool) -> tuple[str, str]:
    """(path, why) for a problem; nothing is said where there is nothing to choose."""
    if is_tpu:
        return portable(problem.num_tokens, is_tpu=True), ""
    key = key_of(problem)
    row = None if key is None else rows.get(key)
    if row is None:
        return portable(problem.num_tokens), "by rule, not measured"
    return row.value.path, f"{row.provenance.us:.0f} us, measured at {row.key.num_tokens} tokens"
