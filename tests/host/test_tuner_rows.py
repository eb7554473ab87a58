"""Rows into tables: who replaces whom, and in which order they stand."""

import dataclasses
import itertools

import pytest
from tuner_fakes import job

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan.key import KERNEL, Key, config_from_json, config_to_json
from tpu_serve.tuner.rows import merge_into, merged, read
from tpu_serve.tuning_tables.files import read_table, table_path, write_table
from tpu_serve.tuning_tables.table import Entry, Provenance, Table, Threshold

JAX = "0.10.2"
V6E = TPU_CHIPS["v6e"]
PROVENANCES = {
    "measured": Provenance("measured", "2026-01-01", JAX, us=5.0),
    "measured, other jax": Provenance("measured", "2026-01-01", "0.9.0", us=5.0),
    "schedule": Provenance("compiled", "2026-01-01", JAX, score=3.0, score_kind="schedule"),
    "bytes": Provenance("compiled", "2026-01-01", JAX, score=1.0, score_kind="bytes"),
    "heuristic": Provenance("heuristic", "2026-01-01", JAX),
}


def row(provenance="schedule", columns=256, **changes):
    return Entry(dataclasses.replace(job().key, **changes), Config("D", columns), PROVENANCES[provenance])


TRUST = [
    ("measured", "measured", True),
    ("measured", "schedule", True),
    ("schedule", "measured", False),
    ("heuristic", "measured", False),
    ("schedule", "measured, other jax", True),
    ("bytes", "measured, other jax", False),
    ("bytes", "schedule", False),
    ("schedule", "bytes", True),
    ("schedule", "schedule", True),
    ("heuristic", "bytes", False),
    ("bytes", "heuristic", True),
]


@pytest.mark.parametrize(("new", "old", "replaces"), TRUST)
def test_a_row_is_replaced_by_one_that_is_trusted_as_much(new, old, replaces):
    (kept,) = merged([row(old, 256)], [row(new, 384)], JAX)
    assert kept.value.tile_columns == (384 if replaces else 256)


def test_other_rows_stay_and_the_order_is_always_the_same():
    rows = [
        row(hidden=hidden, format=format, num_devices=devices, num_tokens=tokens)
        for hidden in (2048, 4096)
        for format in ("bfloat16", "int8_channel")
        for devices in (4, 16)
        for tokens in (8, 16, 1024)
    ]
    for given in (rows, rows[::-1], [*rows[5:], *rows[:5]]):
        assert merged(given, [], JAX) == tuple(rows)
        assert merged(given[:10], given[10:], JAX) == tuple(rows)
    strange = [
        row(combine_dtype=dtype, post_norm=norm) for dtype, norm in itertools.product((None, "int8"), (True, False))
    ]
    assert len(merged(strange, rows, JAX)) == 4 + len(rows)


def test_a_file_keeps_what_else_is_in_it(tmp_path):
    path = table_path(tmp_path, "v6e", KERNEL)
    source = Provenance("ported", "2026-01-01", source="https://example.org")
    threshold = Threshold(2048, 768, 128, 8, 8, "bfloat16", 64, source)
    write_table(path, Table(KERNEL, "v6e", V6E.vmem_bytes, (row(num_tokens=8),), (threshold,)), config_to_json)
    assert merge_into(tmp_path, V6E, [row(num_tokens=16)], JAX) == path
    table = read_table(path, Key, config_from_json)
    assert [entry.key.num_tokens for entry in table.entries] == [8, 16]
    assert table.thresholds == (threshold,)
    before = path.stat().st_ino
    merge_into(tmp_path, V6E, [row("bytes", 384, num_tokens=16)], JAX)
    assert path.stat().st_ino == before, "nothing to write"
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_folder_without_a_table_has_an_empty_one(tmp_path):
    assert read(tmp_path, V6E) == Table(KERNEL, "v6e", V6E.vmem_bytes)
    merge_into(tmp_path, V6E, [row()], JAX)
    assert read(tmp_path, V6E).entries == (row(),)


def test_a_damaged_table_is_not_replaced(tmp_path):
    path = table_path(tmp_path, "v6e", KERNEL)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        merge_into(tmp_path, V6E, [row()], JAX)
    assert path.read_text() == "{"
