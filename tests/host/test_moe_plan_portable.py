"""Which of XLA's own ways of running experts a CPU takes: the rule, rows of tables, and the tuner that makes them."""

import dataclasses
import importlib.metadata

import pytest

from tpu_serve.bench.moe_cases import Case, Layer
from tpu_serve.bench.moe_rows import Row as Timed
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.kernels.fused_moe_v2.problem import Activation
from tpu_serve.moe_plan.layer import MoELayer, Policy
from tpu_serve.moe_plan.lookup import Rows
from tpu_serve.moe_plan.plan import plan_layer
from tpu_serve.moe_plan.portable import (
    MOST_GATHERED_TOKENS,
    TABLE,
    Chosen,
    chosen_from_json,
    chosen_to_json,
    portable_rows,
)
from tpu_serve.tuner import experts
from tpu_serve.tuning_tables.files import read_table, table_path, write_table
from tpu_serve.tuning_tables.table import Entry, Table

JAX = importlib.metadata.version("jax")
LAYER = MoELayer(32, 4, 1024, 256)
SIZES = Layer("small", 32, 4, 1024, 256)


def timed(num_tokens=64, difference=0.0, **times_ms):
    samples = {name: tuple(times) for name, times in times_ms.items()}
    return Timed(Case(SIZES, "bfloat16", num_tokens), {**samples, "empty": (0.1,)}, "ragged", difference)


DENSE_IS_LEAST = timed(dense=(9.0, 2.0), ragged=(3.0, 3.0), gathered=(4.0, 4.0))


def plan(num_tokens, rows=None, chip=None):
    return plan_layer(LAYER, num_tokens, 1, chip or cpu_chip(), Policy(), Rows(portable=rows or {}))


def test_without_rows_few_tokens_are_gathered_on_a_cpu_alone():
    assert [plan(n).path for n in (1, MOST_GATHERED_TOKENS, MOST_GATHERED_TOKENS + 1, 4096)] == [
        "gathered",
        "gathered",
        "ragged",
        "ragged",
    ]
    assert "gathered by rule, not measured" in plan(1).reason
    assert plan(8, chip=TPU_CHIPS["v6e"]).path == "ragged"


def test_a_row_decides_for_its_bucket(tmp_path):
    row = experts.row_of(LAYER, DENSE_IS_LEAST, 2)
    assert (row.value.path, row.provenance.us, row.key.num_tokens) == ("dense", 2000.0, 64)
    rows = {row.key: row}
    assert [plan(n, rows).path for n in (32, 33, 64, 65)] == ["ragged", "dense", "dense", "ragged"]
    assert "dense 2000 us, measured at 64 tokens" in plan(40, rows).reason
    assert plan(64, rows, TPU_CHIPS["v6e"]).path == "ragged"


def test_rows_of_another_jax_or_host_do_not_count(tmp_path):
    row = experts.row_of(LAYER, DENSE_IS_LEAST, 2)
    old = dataclasses.replace(row.provenance, jax="0.1.0")
    elsewhere = dataclasses.replace(row.provenance, host="elsewhere")
    keys = [row.key.at(n) for n in (8, 16, 32)]
    entries = [Entry(key, row.value, known) for key, known in zip(keys, (row.provenance, old, elsewhere), strict=True)]
    path = table_path(tmp_path, "cpu", TABLE)
    write_table(path, Table(TABLE, "cpu", cpu_chip().vmem_bytes, tuple(entries)), chosen_to_json)
    found = portable_rows("cpu", [tmp_path], jax=JAX, host="here")
    assert keys[0] in found
    assert keys[1] not in found
    assert keys[2] not in found
    assert keys[2] in portable_rows("cpu", [tmp_path], jax=JAX, host="elsewhere")


def test_the_tuner_times_and_merges(tmp_path, monkeypatch):
    asked = []

    def measure(cases, num_iters, choose, on_round):
        asked.extend((case.layer, case.dtype, case.num_tokens) for case in cases)
        return [dataclasses.replace(DENSE_IS_LEAST, case=case) for case in cases]

    monkeypatch.setattr(experts, "measure", measure)
    path, rows = experts.tune_experts([("small", LAYER)], (8, 64), 2, tmp_path)
    assert asked == [(SIZES, "bfloat16", 8), (SIZES, "bfloat16", 64)]
    gathered = timed(dense=(9.0,), ragged=(3.0,), gathered=(1.0,))
    monkeypatch.setattr(
        experts, "measure", lambda cases, *_: [dataclasses.replace(gathered, case=case) for case in cases]
    )
    experts.tune_experts([("small", LAYER)], (64, 256), 2, tmp_path)
    found = portable_rows("cpu", [tmp_path], jax=JAX)
    assert {n: found[rows[0].key.at(n)].value.path for n in (8, 64, 256)} == {
        8: "dense",
        64: "gathered",
        256: "gathered",
    }
    held = read_table(path, type(rows[0].key), chosen_from_json)
    assert [entry.key.num_tokens for entry in held.entries] == [8, 64, 256]


def test_what_the_tuner_refuses():
    with pytest.raises(ConfigError, match=r"small differ by 0\.5 of the largest value"):
        experts.row_of(LAYER, timed(dense=(1.0,), ragged=(1.0,), gathered=(1.0,), difference=0.5), 1)
    with pytest.raises(ConfigError, match="--model x: experts in int8 are not timed on a CPU"):
        experts.check("x", dataclasses.replace(LAYER, format="int8"))
    with pytest.raises(ConfigError, match="only SiLU"):
        experts.check("x", dataclasses.replace(LAYER, activation=Activation("gelu")))
    with pytest.raises(ValueError, match="path must be one of dense, ragged, gathered, not 'fused'"):
        Chosen("fused")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compile-only"], "--compile-only is for kernels"),
        (["--candidates", "3"], "--candidates is for kernels"),
        (["--num-tokens", "7"], "--num-tokens 7 is unknown; known are 8, 16"),
        (["--format", "bfloat16", "float32"], "--format: tune experts takes one"),
    ],
)
def test_options_of_the_kernels_are_refused(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experts, "measure", lambda *_: pytest.fail("measured"))
    assert main(["tune", "experts", "--output-dir", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_what_is_shipped_can_be_read():
    """There need not be any; tables of TPUs are about the kernel."""
    for chip in ("cpu", *TPU_CHIPS):
        rows = portable_rows(chip, jax=JAX)
        assert not rows or chip == "cpu"
        for key, row in rows.items():
            assert key.num_devices == 1
            assert row.provenance.host == ""
            layer = MoELayer(key.num_experts, key.top_k, key.hidden, key.intermediate, key.format, key.dtype)
            found = plan_layer(layer, key.num_tokens, 1, cpu_chip(), Policy(), Rows(portable=rows))
            assert found.path == row.value.path
