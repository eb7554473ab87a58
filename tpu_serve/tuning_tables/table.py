"""What a table holds: rows that say which config a kernel runs a problem with, how that is known, and from how many tokens it pays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tpu_serve.tuning_tables.typed import Malformed, from_json, to_json

K = TypeVar("K")
V = TypeVar("V")

SCHEMA = 1
"""Raised when an older program could misread a newer file."""

KINDS = ("measured", "compiled", "heuristic")
"""Of a row, the more trusted first. Measured: on a TPU. Compiled: the TPU compiler accepts it, ranked by what it made. Heuristic: by rule."""

PORTED = "ported"
"""Of a threshold: published by others, for their kernels on the same chip."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """How a row came about.

    Attributes:
      kind: one of `KINDS`, or `PORTED` for a threshold.
      date: of the finding, YYYY-MM-DD; of a ported threshold, when it was taken over.
      jax, libtpu: versions it was found with.
      us, us_xla: microseconds of one layer on the device, by the kernel and by XLA. Only measured and ported rows have them.
      iterations: timed calls behind `us`.
      spread: of the middle half of them, relative to the median.
      score: what ranked a compiled row, lower is better: see `score_kind`. Never a time that was measured.
      score_kind: "schedule" (modelled from the compiled schedule, in microseconds) or "bytes" (calculated from bytes, operations and links alone).
      routing: how tokens were spread over experts: "uniform", "zipf1.0", "capture:<hash>", several joined by "|".
      host: where a measured row holds: "" for every host with that chip, else the name of one.
      source: of a ported threshold, a link.
    """

    kind: str
    date: str
    jax: str = ""
    libtpu: str = ""
    us: float | None = None
    us_xla: float | None = None
    iterations: int | None = None
    spread: float | None = None
    score: float | None = None
    score_kind: str = ""
    routing: str = ""
    host: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, PORTED):
            raise ValueError(f"kind must be one of {', '.join((*KINDS, PORTED))}, not {self.kind!r}")
        if any(time is not None and time <= 0 for time in (self.us, self.us_xla)):
            raise ValueError("times must be positive")
        has_times = self.us is not None or self.us_xla is not None
        if has_times and self.kind not in ("measured", PORTED):
            raise ValueError(f"a {self.kind} row cannot hold times, which are for measured ones")
        if self.kind == "measured" and self.us is None:
            raise ValueError("a measured row must hold the time, us")
        if self.kind == PORTED and not self.source:
            raise ValueError("what is ported must name its source")

    def rank(self, jax: str) -> int:
        """Lower is more trusted. What was measured with another minor version of JAX counts as compiled until it is measured again."""
        demoted = self.kind == "measured" and _minor(self.jax) != _minor(jax)
        return KINDS.index("compiled" if demoted else self.kind)


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@dataclass(frozen=True, slots=True)
class Entry(Generic[K, V]):
    """A row.

    Attributes:
      key: the problem, of the kernel's key type; its `num_tokens` is a bucket.
      value: the config.
      min_tokens_fused: fewer tokens of the bucket go to XLA; None where nobody measured both.
    """

    key: K
    value: V
    provenance: Provenance
    min_tokens_fused: int | None = None

    def __post_init__(self) -> None:
        if self.provenance.kind == PORTED:
            raise ValueError("a row of tiles cannot be ported: tiles are this kernel's own")
        if self.min_tokens_fused is not None:
            if self.provenance.kind != "measured":
                raise ValueError(f"min_tokens_fused needs a measured row, not a {self.provenance.kind} one")
            if self.min_tokens_fused < 0:
                raise ValueError(f"min_tokens_fused must not be negative, got {self.min_tokens_fused}")
            if self.provenance.us_xla is None:
                raise ValueError("min_tokens_fused needs the time of XLA too, us_xla")


@dataclass(frozen=True, slots=True)
class Threshold:
    """From how many tokens others saw a kernel of the same kind ahead of XLA on this chip.

    Attributes:
      hidden, intermediate, num_experts, top_k, num_devices: of the layer they measured.
      weights: type of its stored weights.
      min_tokens: the least number of tokens that they measured with the kernel ahead; at fewer it was behind, or not measured.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_devices: int
    weights: str
    min_tokens: int
    provenance: Provenance

    def __post_init__(self) -> None:
        if self.provenance.kind not in ("measured", PORTED):
            raise ValueError(f"a threshold is measured or ported, not {self.provenance.kind}")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")


@dataclass(frozen=True, slots=True)
class Table(Generic[K, V]):
    """One file.

    Attributes:
      kernel: the package below `kernels/`.
      device: name of the chip.
      vmem_bytes: of the chip; rows chosen for another amount are not to be trusted.
    """

    kernel: str
    device: str
    vmem_bytes: int
    entries: tuple[Entry[K, V], ...] = ()
    thresholds: tuple[Threshold, ...] = field(default=())


def parse(text: str, key: type[K], value: Callable[[Any, str], V]) -> Table[K, V]:
    """A table from a file's text.

    Args:
      key: dataclass of the keys.
      value: makes a config of a row's JSON, given where it stands for messages.

    Raises:
      Malformed: not JSON, of a newer schema, a field that is unknown, missing or of another type, or the same key twice.
    """
    try:
        read = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
        raise Malformed(str(error)) from None
    if not isinstance(read, dict):
        raise Malformed(f"the file must hold an object, not a {type(read).__name__}")
    schema = read.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise Malformed(f"schema must be a positive number, not {schema!r}")
    if schema > SCHEMA:
        raise Malformed(
            f"schema {schema} is newer than the {SCHEMA} that this version of tpu-serve reads; upgrade tpu-serve"
        )
    names = ("schema", "kernel", "device", "vmem_bytes", "thresholds", "entries")
    if unknown := [name for name in read if name not in names]:
        raise Malformed(f"the file has the unknown field {unknown[0]!r}; known are {', '.join(names)}")
    header = {name: read.get(name) for name in ("kernel", "device", "vmem_bytes")}
    for name, kind in (("kernel", str), ("device", str), ("vmem_bytes", int)):
        if type(header[name]) is not kind:
            raise Malformed(f"{name} must be {kind.__name__}, not {header[name]!r}")
    rows = {name: read.get(name, []) for name in ("thresholds", "entries")}
    for name, found in rows.items():
        if not isinstance(found, list):
            raise Malformed(f"{name} must be a list, not a {type(found).__name__}")
    thresholds = tuple(
        from_json(Threshold, one, f"threshold {place}") for place, one in enumerate(rows["thresholds"], 1)
    )
    entries = tuple(_entry(one, f"entry {place}", key, value) for place, one in enumerate(rows["entries"], 1))
    seen: dict[K, int] = {}
    for place, entry in enumerate(entries, 1):
        if entry.key in seen:
            raise Malformed(f"entry {place} has the key of entry {seen[entry.key]}")
        seen[entry.key] = place
    return Table(read["kernel"], read["device"], read["vmem_bytes"], entries, thresholds)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Malformed(f"an object has the field {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _no_number(name: str) -> Any:
    raise Malformed(f"{name} is no number")


def _entry(row: Any, where: str, key: type[K], value: Callable[[Any, str], V]) -> Entry[K, V]:
    if not isinstance(row, dict):
        raise Malformed(f"{where} must be an object, not a {type(row).__name__}")
    names = ("key", "value", "min_tokens_fused", "provenance")
    if unknown := [name for name in row if name not in names]:
        raise Malformed(f"{where} has the unknown field {unknown[0]!r}; known are {', '.join(names)}")
    if missing := [name for name in ("key", "value", "provenance") if name not in row]:
        raise Malformed(f"{where} lacks the field {missing[0]!r}")
    least = row.get("min_tokens_fused")
    if least is not None and type(least) is not int:
        raise Malformed(f"{where}: min_tokens_fused must be int or null, not {least!r}")
    found = (
        from_json(key, row["key"], f"{where}: key"),
        value(row["value"], f"{where}: value"),
        from_json(Provenance, row["provenance"], f"{where}: provenance"),
    )
    try:
        return Entry(*found, least)
    except ValueError as error:
        raise Malformed(f"{where}: {error}") from None


def dumps(table: Table[K, V], value: Callable[[V], dict[str, Any]]) -> str:
    """A file's text, a row a line, that `parse` reads back.

    Args:
      value: JSON of a config.
    """
    entries = []
    for entry in table.entries:
        row: dict[str, Any] = {"key": to_json(entry.key), "value": value(entry.value)}
        if entry.min_tokens_fused is not None:
            row["min_tokens_fused"] = entry.min_tokens_fused
        entries.append({**row, "provenance": to_json(entry.provenance)})
    head = {"schema": SCHEMA, "kernel": table.kernel, "device": table.device, "vmem_bytes": table.vmem_bytes}
    lines = [f" {json.dumps(name)}: {json.dumps(held)}," for name, held in head.items()]
    lines.append(f' "thresholds": {_rows([to_json(one) for one in table.thresholds])},')
    lines.append(f' "entries": {_rows(entries)}')
    return "\n".join(["{", *lines, "}"]) + "\n"


def _rows(rows: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]" if rows else "[]"
