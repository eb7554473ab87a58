"""Which path runs the experts of a layer on this CPU: all of them timed in turn, for every token count, and the fastest kept in a table."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

from tpu_serve.bench.moe import measure
from tpu_serve.bench.moe_cases import BACKENDS, DTYPES, Layer, make_cases
from tpu_serve.bench.moe_rows import MOST_DIFFERENCE
from tpu_serve.bench.moe_rows import Row as Timed
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import cpu_chip
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.moe_plan.key import Key, key_of
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of
from tpu_serve.moe_plan.portable import TABLE, Chosen, PortableRow, chosen_from_json, chosen_to_json, portable
from tpu_serve.tuning_tables.files import locked, read_table, table_path, write_table
from tpu_serve.tuning_tables.table import Entry, Provenance, Table

TOKENS = (8, 16, 32, 64, 128, 256)
"""Tuned for if none are named: steps of a CPU have no more."""


def tune_experts(
    layers: Sequence[tuple[str, MoELayer]], tokens: Sequence[int], num_iters: int, folder: Path,
    on_round: Callable[[], None] = lambda: None,
) -> tuple[Path, list[PortableRow]]:  # fmt: skip
    """Times layers and merges what is found into the table of a folder.

    Args:
      layers: by name, with weights that are not quantised.
      tokens: of `moe_plan.key.BUCKETS`.
      num_iters: rounds of each; the least time of a path counts, as whatever else the machine does only adds to it.
      on_round: called after every round.

    Returns:
      The file, and the new rows.

    Raises:
      ConfigError: a layer has experts that are not timed here or needs too much memory, or the table cannot be read or written.
    """
    found: dict[Key, PortableRow] = {}
    for name, layer in layers:
        check(name, layer)
        sizes = Layer(name, layer.num_experts, layer.top_k, layer.hidden, layer.intermediate)
        cases = make_cases([sizes], [layer.format], tokens, 0, cpu_chip().memory_bytes)
        for timed in measure(cases, num_iters, lambda count, *_: portable(count), on_round):
            row = row_of(layer, timed, num_iters)
            found[row.key] = row
    return _merge(folder, found), list(found.values())


def check(name: str, layer: MoELayer) -> None:
    """Raises `ConfigError` where the layer is none that is timed here."""
    if layer.format not in DTYPES:
        raise ConfigError(
            f"--model {name}: experts in {layer.format} are not timed on a CPU, only in {' and '.join(DTYPES)}."
        )
    if layer.gate_up_bias or layer.down_bias or layer.activation != Activation():
        raise ConfigError(
            f"--model {name}: experts with biases or {layer.activation.name} are not timed on a CPU, only SiLU."
        )


def row_of(layer: MoELayer, timed: Timed, num_iters: int) -> PortableRow:
    """The row that times make.

    Raises:
      ConfigError: the paths do not compute the same.
    """
    case = timed.case
    if not timed.difference <= MOST_DIFFERENCE[case.dtype]:
        raise ConfigError(
            f"The paths' results for {case.num_tokens} tokens of {case.layer.name} differ by {timed.difference:.2g} of the largest value."
        )
    least = {name: min(timed.samples_ms[name]) for name in BACKENDS}
    path = min(BACKENDS, key=least.__getitem__)
    key = key_of(problem_of(layer, case.num_tokens, 1, Policy()))
    assert key is not None
    now = Provenance(
        "measured", datetime.datetime.now(datetime.UTC).date().isoformat(), importlib.metadata.version("jax"),
        us=round(least[path] * 1e3, 1), iterations=num_iters, routing="uniform",
    )  # fmt: skip
    return Entry(key, Chosen(path), now)


def _merge(folder: Path, new: dict[Key, PortableRow]) -> Path:
    chip = cpu_chip()
    path = table_path(folder, chip.name, TABLE)
    with locked(path):
        held = read_table(path, Key, chosen_from_json) if path.exists() else Table(TABLE, chip.name, chip.vmem_bytes)
        rows = {row.key: row for row in held.entries} | new
        ordered = sorted(rows.values(), key=lambda row: [str(value).zfill(8) for value in dataclasses.astuple(row.key)])
        write_table(path, dataclasses.replace(held, entries=tuple(ordered)), chosen_to_json)
    return path
