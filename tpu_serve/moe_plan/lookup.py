"""Which row of the tables answers for a problem, and with what config: always one that is legal, or none with the reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.kernels.fused_moe_v2.problem import Problem
from tpu_serve.moe_plan.key import BUCKETS, Key, key_of
from tpu_serve.moe_plan.portable import PortableRow
from tpu_serve.tuning_tables.table import PORTED, Entry, Table, Threshold

Source = Literal["exact", "bucket", "near", "heuristic", "given"]
"""How a config was found: the problem's own row; the row of the next bucket above; the row of a layer of the same sizes with the most similar
load of an expert; no row, by rule; told by the user."""

Row = Entry[Key, Config]
_Shape = tuple[int, int, str, int, str]


@dataclass(frozen=True, slots=True)
class Found:
    """A config, and where it comes from.

    Attributes:
      row: the one that it is from, if any.
      passed_over: rows that came first and cannot be used, each with the reason.
    """

    config: Config
    source: Source
    row: Row | None = None
    passed_over: tuple[str, ...] = ()


class Rows:
    """The rows of one chip, most trusted first, to be looked up.

    Rows that were measured on another host than this one are not among them.
    """

    def __init__(
        self,
        tables: Sequence[Table[Key, Config]] = (),
        *,
        jax: str = "",
        host: str = "",
        portable: Mapping[Key, PortableRow] = MappingProxyType({}),
    ):
        """
        Args:
          tables: the first ones go before later ones where they are equally trusted.
          jax: version that is used; what was measured with another counts for less.
          host: name of this one.
          portable: of the paths in XLA's own operations, see `portable_rows`.
        """
        self.portable = portable
        self._exact: dict[Key, Row] = {}
        self._alike: dict[_Shape, list[Row]] = {}
        self._jax = jax
        self.thresholds: list[Threshold] = [
            one
            for table in tables
            for one in table.thresholds
            if one.provenance.kind == PORTED or (one.provenance.host in ("", host) and one.provenance.rank(jax) == 0)
        ]
        for table in tables:
            for row in table.entries:
                if row.provenance.host not in ("", host):
                    continue
                held = self._exact.get(row.key)
                if held is None or row.provenance.rank(jax) < held.provenance.rank(jax):
                    self._exact[row.key] = row
        for row in self._exact.values():
            self._alike.setdefault(_shape(row.key), []).append(row)

    def __len__(self) -> int:
        return len(self._exact)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._exact.values())

    def is_measured(self, row: Row) -> bool:
        """With this minor version of JAX."""
        return row.provenance.rank(self._jax) == 0

    def exact(self, key: Key) -> Row | None:
        return self._exact.get(key)

    def above(self, key: Key) -> Iterator[Row]:
        """Rows of the same layer at and above the key's bucket, nearest first. Tiles are legal for fewer rows, not for more."""
        for bucket in BUCKETS[BUCKETS.index(key.num_tokens) :]:
            if (row := self._exact.get(key.at(bucket))) is not None:
                yield row

    def alike(self, key: Key) -> list[Row]:
        """Rows of other layers with the same sizes, format and devices, the most similar load of an expert first."""
        wanted = math.log2(key.rows_per_expert)
        others = (row for row in self._alike.get(_shape(key), ()) if row.key.at(key.num_tokens) != key)
        return sorted(others, key=lambda row: abs(math.log2(row.key.rows_per_expert) - wanted))


def _shape(key: Key) -> _Shape:
    return key.hidden, key.intermediate, key.format, key.num_devices, key.dtype


def find(problem: Problem, chip: Chip, rows: Rows) -> Found:
    """The config for a problem.

    Raises:
      ValueError: the kernel cannot run it on the chip with any config; the message is the reason.
    """
    key = key_of(problem)
    passed_over: list[str] = []

    def usable(row: Row) -> Config | None:
        config = fitted(row.value, problem)
        if (reason := check(problem, config, chip)) is None:
            return config
        passed_over.append(f"the row for {_named(row.key, key)}: {reason}")
        return None

    own = rows.exact(key) if key is not None and key.num_tokens == problem.num_tokens else None
    if own is not None and (config := usable(own)) is not None:
        return Found(config, "exact", own)
    rule = heuristic(problem, chip)
    if key is not None:
        for source, row in _others(key, rows):
            # A row of the other mode lies beyond the token count at which modes change, and says nothing about this one. Not so in its own
            # bucket, where it was found to be the better one.
            is_its_bucket = source == "bucket" and row.key.num_tokens == key.num_tokens
            if row is own or (row.value.mode != rule.mode and not is_its_bucket):
                continue
            if (config := usable(row)) is not None:
                return Found(config, source, row, tuple(passed_over))
    return Found(rule, "heuristic", None, tuple(passed_over))


MOST_STRETCH = 2.0
"""Tiles that nobody measured are taken for at most so many times more or fewer rows of an expert than they were found for: further away the rule,
which knows the real number, is the better guess."""


def _others(key: Key, rows: Rows) -> Iterator[tuple[Source, Row]]:
    """Rows of other token counts or layers that may answer, best first."""
    for row in rows.above(key):
        if rows.is_measured(row) or row.key.num_tokens == key.num_tokens:
            yield "bucket", row
    for row in rows.alike(key)[:1]:
        stretch = abs(math.log2(row.key.rows_per_expert / key.rows_per_expert))
        if rows.is_measured(row) or stretch <= math.log2(MOST_STRETCH):
            yield "near", row


def fitted(config: Config, problem: Problem) -> Config:
    """A row's config for a problem that may lack what the row was made with: nothing is dispatched where every device has all tokens."""
    has_dispatch = problem.sequence_parallel and problem.num_devices > 1
    if config.mode == "G" and not has_dispatch and (config.dispatch != "xla_ag" or config.rounds > 1):
        return dataclasses.replace(config, dispatch="xla_ag", rounds=1)
    return config


def _named(row: Key, asked: Key | None) -> str:
    """A row's key by what tells it from the one asked for."""
    if asked is None or row == asked:
        return f"{row.num_tokens} tokens"
    parts = [f"{row.num_tokens} tokens"]
    if (row.num_experts, row.top_k) != (asked.num_experts, asked.top_k):
        parts.append(f"{row.top_k} of {row.num_experts} experts")
    return ", ".join(parts)
