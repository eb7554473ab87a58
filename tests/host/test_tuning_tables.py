"""Tables of tuned choices: what a file may hold, what is refused and how, and that what is written is read back."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan.key import BUCKETS, KERNEL, Key, bucket_of, config_from_json, config_to_json, key_of
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of
from tpu_serve.tuning_tables.files import read_table, read_tables, write_table
from tpu_serve.tuning_tables.table import Entry, Provenance, Table, Threshold, dumps, parse
from tpu_serve.tuning_tables.typed import Malformed

KEY = Key(2048, 768, 128, 8, 8, "bfloat16", 256)
COMPILED = Provenance(
    "compiled", "2026-11-30", "0.10.2", "0.0.42.1", score=12.5, score_kind="schedule", routing="uniform"
)
MEASURED = Provenance("measured", "2026-11-30", "0.10.2", us=100.0, us_xla=150.0, iterations=20, spread=0.01)
ROW = Entry(KEY, Config("D", 768, 3, compact_rows=32), COMPILED)
GROUPED = Entry(
    KEY.at(4096), Config("G", 768, 2, 256, 128, "push_ag", "rs", 2, 32, resident=True), MEASURED, min_tokens_fused=0
)
PORTED = Provenance("ported", "2026-06-01", us=547.0, us_xla=753.0, source="https://example.org/figures")
TABLE = Table(KERNEL, "v6e", 128 * 2**20, (ROW, GROUPED), (Threshold(2048, 768, 128, 8, 8, "bfloat16", 512, PORTED),))


def text(table=TABLE):
    return dumps(table, config_to_json)


def read(text):
    return parse(text, Key, config_from_json)


def changed(change):
    """The text of a table whose JSON has been changed."""
    value = json.loads(text())
    change(value)
    return json.dumps(value)


def test_what_is_written_is_read_back():
    assert read(text()) == TABLE


def test_a_row_takes_a_line():
    lines = text().splitlines()
    rows = [line for line in lines if '"tile_columns"' in line]
    assert len(rows) == len(TABLE.entries)
    for line in rows:
        assert json.loads(line.rstrip(","))["key"]["hidden"] == 2048


def test_a_row_holds_every_tile_and_no_field_of_the_other_mode():
    """So that no default of the code can change what a row says."""
    in_d, in_g = (json.loads(text())["entries"][index]["value"] for index in (0, 1))
    assert in_d == {"mode": "D", "tile_columns": 768, "ring_slots": 3, "compact_rows": 32}
    assert set(in_g) | set(in_d) == {field.name for field in dataclasses.fields(Config)}
    assert "compact_rows" not in in_g


def entry(index, part=None):
    def of(value):
        found = value["entries"][index]
        return found if part is None else found[part]

    return of


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(schema=2), "schema 2 is newer than the 1 that this version of tpu-serve reads; upgrade"),
        (lambda t: t.pop("schema"), "schema must be a positive number, not None"),
        (lambda t: t.update(schema=True), "schema must be a positive number, not True"),
        (lambda t: t.update(author="me"), "the file has the unknown field 'author'"),
        (lambda t: t.update(entries={}), "entries must be a list, not a dict"),
        (lambda t: t.update(vmem_bytes="64 MiB"), "vmem_bytes must be int, not '64 MiB'"),
        (lambda t: t["entries"].append(3), "entry 3 must be an object, not a int"),
        (lambda t: t["entries"].append(t["entries"][0]), "entry 3 has the key of entry 1"),
        (lambda t: entry(0)(t).update(us=3), "entry 1 has the unknown field 'us'"),
        (lambda t: entry(1)(t).pop("provenance"), "entry 2 lacks the field 'provenance'"),
        (lambda t: entry(0, "key")(t).update(hiden=1), "entry 1: key has the unknown field 'hiden'; did you mean 'hidden'"),
        (lambda t: entry(0, "key")(t).pop("top_k"), "entry 1: key lacks the field 'top_k'"),
        (lambda t: entry(0, "key")(t).update(hidden=2048.0), "entry 1: key: hidden must be int, not 2048.0"),
        (lambda t: entry(0, "key")(t).update(hidden=True), "entry 1: key: hidden must be int, not True"),
        (lambda t: entry(0, "key")(t).update(num_tokens=300), "num_tokens must be one of 8, 16, .* got 300"),
        (lambda t: entry(0, "value")(t).update(mode="X"), "entry 1: value must be an object with a mode of D or G"),
        (lambda t: entry(0, "value")(t).update(rounds=1), "has the field 'rounds', which mode D does not have"),
        (lambda t: entry(1, "value")(t).pop("rounds"), "entry 2: value lacks the field 'rounds' of mode G"),
        (lambda t: entry(1, "value")(t).update(rounds="2"), "entry 2: value: rounds must be int, not '2'"),
        (lambda t: entry(0)(t).update(min_tokens_fused=8), "min_tokens_fused needs a measured row, not a compiled one"),
        (lambda t: entry(1)(t).update(min_tokens_fused=-1), "min_tokens_fused must not be negative"),
        (lambda t: entry(1)(t).update(min_tokens_fused="8"), "min_tokens_fused must be int or null"),
        (lambda t: entry(1, "provenance")(t).pop("us_xla"), "min_tokens_fused needs the time of XLA too"),
        (lambda t: entry(0, "provenance")(t).update(us=3.0), "a compiled row cannot hold times"),
        (lambda t: entry(0, "provenance")(t).update(kind="guess"), "kind must be one of measured, compiled, heuristic, ported"),
        (lambda t: entry(1, "provenance")(t).pop("us"), "a measured row must hold the time"),
        (lambda t: entry(0).__call__(t)["provenance"].update(kind="ported", source="x"), "a row of tiles cannot be ported"),
        (lambda t: t["thresholds"][0]["provenance"].pop("source"), "threshold 1: provenance: what is ported must name its source"),
        (lambda t: t["thresholds"][0].update(min_tokens=0), "threshold 1: min_tokens must be at least 1"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_its_place(change, words):
    with pytest.raises(Malformed, match=words):
        read(changed(change))


@pytest.mark.parametrize("length", [0, 1, 30, 200, -3])
def test_a_file_that_was_cut_off(length):
    with pytest.raises(Malformed, match="not JSON: line"):
        read(text()[:length])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"us": 100.0', '"us": NaN', "NaN is no number"),
        ('"us": 100.0', '"us": -Infinity', "-Infinity is no number"),
        ('"us": 100.0', '"us": -5', "entry 2: provenance: times must be positive"),
        ('"us": 100.0', '"us": 1' + "0" * 400, "us must be float or null"),
        ('"us": 100.0', '"us": 1' + "0" * 5000, "Exceeds the limit"),
        ('"hidden": 2048', '"hidden": 2048, "hidden": 4096', "an object has the field 'hidden' twice"),
        ('"schema": 1', '"schema": 1, "entries": []', "an object has the field 'entries' twice"),
        ('{\n "schema"', "[" * 200_000 + '{ "schema"', "recursion"),
    ],
)
def test_numbers_that_are_none_and_fields_that_come_twice(old, new, words):
    assert old in text()
    with pytest.raises(Malformed, match=words):
        read(text().replace(old, new, 1))


def test_writers_of_the_same_table_do_not_lose_each_others_rows(tmp_path):
    code = (
        "import sys; from pathlib import Path; from test_tuning_tables import KEY, COMPILED; import dataclasses;"
        "from tpu_serve.tuning_tables.table import Entry; from tpu_serve.kernels.fused_moe_v2.config import Config;"
        "from tpu_serve.moe_plan.merge import merge_into; from tpu_serve.device.chip import TPU_CHIPS\n"
        "for hidden in range(128, 128 * 21, 128):\n"
        "  key = dataclasses.replace(KEY, hidden=hidden, top_k=int(sys.argv[2]))\n"
        "  merge_into(Path(sys.argv[1]), TPU_CHIPS['v6e'], [Entry(key, Config('D', 768, 3), COMPILED)], '0.10.2')"
    )
    here = str(Path(__file__).parent)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(number)], env={**os.environ, "PYTHONPATH": here}
        )
        for number in (1, 2, 3)
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found = read_table(tmp_path / "v6e" / f"{KERNEL}.json", Key, config_from_json)
    assert len(found.entries) == 60


def test_a_link_stays_one_and_the_folder_of_a_chip_is_told_from_that_of_all(tmp_path):
    real, path = tmp_path / "real.json", tmp_path / "all" / "v6e" / f"{KERNEL}.json"
    path.parent.mkdir(parents=True)
    path.symlink_to(real)
    write_table(path, TABLE, config_to_json)
    assert path.is_symlink()
    assert real.is_file()
    with pytest.raises(ConfigError, match="is the folder of one chip; name the one that it lies in"):
        read_tables("v6e", KERNEL, [path.parent], Key, config_from_json)


def test_files_are_found_by_chip_and_kernel_and_checked_against_their_place(tmp_path):
    path = tmp_path / "v6e" / f"{KERNEL}.json"
    write_table(path, TABLE, config_to_json)
    assert read_table(path, Key, config_from_json) == TABLE
    found = read_tables("v6e", KERNEL, [tmp_path], Key, config_from_json)
    assert found[0] == TABLE
    assert not [one for one in read_tables("v5e", KERNEL, [tmp_path], Key, config_from_json) if ROW in one.entries]
    moved = tmp_path / "v5e" / f"{KERNEL}.json"
    write_table(moved, TABLE, config_to_json)
    with pytest.raises(ConfigError, match="is about the device 'v6e', not 'v5e' as its place says"):
        read_tables("v5e", KERNEL, [tmp_path], Key, config_from_json)
    write_table(path, dataclasses.replace(TABLE, vmem_bytes=1), config_to_json)
    with pytest.raises(ConfigError, match=r"v6e/fused_moe_v2.json is for 1 bytes of VMEM; v6e has"):
        read_tables("v6e", KERNEL, [tmp_path], Key, config_from_json)
    path.write_bytes(b"{\xff")
    with pytest.raises(ConfigError, match=r"v6e/fused_moe_v2.json is damaged: byte 1 is not UTF-8"):
        read_tables("v6e", KERNEL, [tmp_path], Key, config_from_json)
    with pytest.raises(ConfigError, match=r"--moe-tuning-dir .*nowhere is not a folder"):
        read_tables("v6e", KERNEL, [tmp_path / "nowhere"], Key, config_from_json)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "v6e" / f"{KERNEL}.json"
    write_table(path, TABLE, config_to_json)

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_table(path, dataclasses.replace(TABLE, entries=()), config_to_json)
    assert read_table(path, Key, config_from_json) == TABLE
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing half written is left behind"


def test_what_was_measured_with_another_jax_counts_as_compiled():
    assert MEASURED.rank("0.10.9") < COMPILED.rank("0.10.9")
    assert MEASURED.rank("0.11.0") == COMPILED.rank("0.11.0")


def test_buckets():
    assert [bucket_of(tokens) for tokens in (1, 8, 9, 256, 257, 32768)] == [8, 8, 16, 256, 512, 32768]
    assert bucket_of(32769) is None
    layer = MoELayer(128, 8, 2048, 768)
    assert key_of(problem_of(layer, 200, 8, Policy())) == KEY
    assert key_of(problem_of(layer, 40000, 8, Policy())) is None
    with_parallelism = problem_of(layer, 200, 8, Policy(sequence_parallel=True))
    assert key_of(with_parallelism) == KEY, "rows do not depend on it"


@pytest.mark.parametrize("chip", list(TPU_CHIPS))
def test_shipped_tables_are_sound(chip):
    """Every row parses, names a bucket, and is legal on its chip; see test_moe_plan for what they are used for."""
    for table in read_tables(chip, KERNEL, [], Key, config_from_json):
        assert table.device == chip
        assert len({row.key for row in table.entries}) == len(table.entries)
        assert {row.key.num_tokens for row in table.entries} <= set(BUCKETS)
        for row in table.entries:
            assert row.provenance.kind != "heuristic", "what the code finds by itself needs no row"
            assert not row.provenance.host, "a shipped row holds everywhere"
