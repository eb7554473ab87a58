"""Timing both ways of running the experts at a server's start: which way is taken, what is kept, what a later start makes of it."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from warm_up_fakes import CONFIG, JAX, SERVED, V6E, Clock, layer, options, params, start

from tpu_serve import ConfigError
from tpu_serve.config import MoEOptions
from tpu_serve.device.chip import cpu_chip
from tpu_serve.engine.warm_up import WarmUp, first_experts
from tpu_serve.layers.moe.routing import Routing
from tpu_serve.layers.moe.timing import Timing, TooShort, chained
from tpu_serve.moe_plan.key import BUCKETS, KERNEL, key_of
from tpu_serve.moe_plan.merge import merge_into, read
from tpu_serve.tuning_tables.files import table_path
from tpu_serve.tuning_tables.table import Entry, Provenance


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A host "here" with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("platform.node", lambda: "here")
    return tmp_path / "cache" / "tpu-serve" / "tuning_tables"


def paths(experts, buckets=SERVED):
    return [experts.planner.plan(num_tokens).path for num_tokens in buckets]


def traced(experts, num_tokens):
    """The program of a layer, as text."""
    x = jax.ShapeDtypeStruct((num_tokens, 384), jnp.bfloat16)
    routing = Routing(
        jax.ShapeDtypeStruct((num_tokens, 2), jnp.float32), jax.ShapeDtypeStruct((num_tokens, 2), jnp.int32)
    )
    return str(jax.make_jaxpr(experts)(x, routing, first_experts(params())))


def test_the_faster_way_is_taken_and_kept(home, caplog):
    caplog.set_level(logging.INFO)
    before = layer(options())
    assert paths(before) == ["fused", "fused", "ragged", "fused"]
    clock = Clock({("ragged", 64): 50.0})
    after = start(options(), clock)
    assert paths(after) == ["ragged", "fused", "fused", "fused"]
    assert clock.asked == [(path, tokens) for tokens in (64, 128, 512) for path in ("fused", "ragged")]
    for num_tokens, has_kernel in ((64, (True, False)), (300, (False, True))):
        assert tuple("pallas_call" in traced(experts, num_tokens) for experts in (before, after)) == has_kernel
    assert after.planner.counts().total() == len(SERVED), "the server's metrics read them"

    rows = {row.key.num_tokens: row for row in read(home, V6E).entries}
    assert sorted(rows) == [64, 128, 512]
    for num_tokens, row in rows.items():
        assert row.key == key_of(before.planner.plan(num_tokens).problem)
        assert row.value == before.planner.plan(num_tokens).config
        known = row.provenance
        assert (known.kind, known.host, known.routing, known.jax) == ("measured", "here", "uniform", JAX)
        assert (known.us, known.us_xla) == (100.0, 50.0 if num_tokens == 64 else 200.0)
        assert (known.iterations, known.spread) == (80, 0.01235)
        assert known.libtpu
    assert [rows[num_tokens].min_tokens_fused for num_tokens in (64, 128, 512)] == [65, 0, 0]
    assert "64 tokens take 100.0 us with the fused kernel (fused D " in caplog.text
    assert "heuristic), 50.0 us with XLA (ragged): XLA is taken" in caplog.text
    assert "512 tokens take 100.0 us with the fused kernel (fused G " in caplog.text
    assert f"the times are kept in {table_path(home, 'v6e', KERNEL)}" in caplog.text


def test_a_second_start_times_nothing_and_runs_the_same(caplog):
    first = start(options(), Clock({("ragged", 64): 50.0}))
    caplog.set_level(logging.INFO)
    clock = Clock()
    second = start(options(), clock)
    assert clock.asked == []
    assert "measured before, at 64, 128, 512 tokens" in caplog.text
    assert [second.planner.plan(n) for n in SERVED] == [first.planner.plan(n) for n in SERVED]
    assert paths(layer(MoEOptions())) == paths(first), "a start without the option reads them too"
    more = Clock()
    start(options(), more, (64, 96, 256))
    assert more.asked == [("fused", 256), ("ragged", 256)]


def test_a_bucket_between_those_of_tables_gets_the_row_that_answers_for_it(home):
    """No row is about a number of tokens that was not measured."""
    clock = Clock({("ragged", 128): 50.0})
    after = start(options(), clock, (96, 100, 40000))
    assert clock.asked == [("fused", 128), ("ragged", 128)]
    assert paths(after, (96, 100)) == ["ragged", "ragged"]
    assert [row.key.num_tokens for row in read(home, V6E).entries] == [128]
    assert not after.planner.plan(96).has_exact_row
    with pytest.raises(ConfigError, match=f"40000 tokens are more than the {BUCKETS[-1]} that tables have rows for"):
        WarmUp(options(), layer(options()), (40000,), Clock())


def test_rows_go_to_the_first_folder_that_is_named(home, tmp_path):
    folders = tmp_path / "mine", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    start(options(*folders), Clock({("ragged", 64): 50.0}))
    assert [len(read(folder, V6E).entries) for folder in (*folders, home)] == [3, 0, 0]
    clock = Clock()
    assert paths(start(options(*folders), clock))[0] == "ragged"
    assert clock.asked == []


@pytest.mark.parametrize(
    "known",
    [
        Provenance("measured", "2026-01-01", JAX, us=1.0, us_xla=2.0, host="there"),
        Provenance("compiled", "2026-01-01", JAX, score=1.0, score_kind="bytes"),
    ],
    ids=["of another host", "for all hosts"],
)
def test_a_row_of_others_is_not_enough_and_stays(known, home, tmp_path):
    plan = layer(MoEOptions()).planner.plan(64)
    given = dataclasses.replace(plan.config, ring_slots=plan.config.ring_slots - 1)
    row = Entry(key_of(plan.problem), given, known)
    mine = tmp_path / "mine"
    merge_into(mine, V6E, [row], JAX)
    clock = Clock({("ragged", 64): 50.0})
    after = start(options(mine), clock, (64, 128))
    assert len(clock.asked) == 4
    assert paths(after, (64, 128)) == ["ragged", "fused"]
    assert {one.key.num_tokens: one.provenance.host for one in read(mine, V6E).entries} == {64: known.host, 128: "here"}
    (own,) = read(home, V6E).entries
    assert (own.key.num_tokens, own.provenance.host) == (64, "here")
    assert own.value == (given if known.host == "" else plan.config), "tiles of another host's row are not taken"
    again = Clock()
    assert paths(start(options(mine), again, (64, 128)), (64, 128)) == ["ragged", "fused"]
    assert again.asked == []


def test_times_that_hold_on_every_host_are_enough_and_those_of_an_older_jax_are_not(home):
    plans = {num_tokens: layer(MoEOptions()).planner.plan(num_tokens) for num_tokens in (64, 128, 256)}
    given = {
        64: (Provenance("measured", "2026-01-01", JAX, us=3.0, us_xla=2.0), 65),
        128: (Provenance("measured", "2026-01-01", "0.9.0", us=3.0, us_xla=2.0, host="here"), 129),
        256: (Provenance("measured", "2026-01-01", JAX, us=3.0, host="here"), None),
    }
    rows = [Entry(key_of(plans[tokens].problem), plans[tokens].config, *known) for tokens, known in given.items()]
    merge_into(home, V6E, rows, JAX)
    clock = Clock({("ragged", 256): 50.0})
    after = start(options(), clock, (64, 128, 256))
    assert clock.asked == [(path, tokens) for tokens in (128, 256) for path in ("fused", "ragged")]
    assert paths(after, (64, 128, 256)) == ["ragged", "fused", "ragged"]
    assert [row.provenance.us for row in read(home, V6E).entries] == [3.0, 100.0, 100.0]


def test_what_a_dispatch_would_use_of_a_row_is_not_lost(home):
    """This server has no dispatch, and runs a row without its part about that."""
    plan = layer(MoEOptions()).planner.plan(512)
    given = dataclasses.replace(plan.config, dispatch="push_ag", rounds=2)
    provenance = Provenance("measured", "2026-01-01", "0.9.0", us=3.0, us_xla=2.0, host="here")
    merge_into(home, V6E, [Entry(key_of(plan.problem), given, provenance, 513)], JAX)
    after = start(options(), Clock(), (512,))
    (row,) = read(home, V6E).entries
    assert (row.provenance.jax, row.value) == (JAX, given)
    assert after.planner.plan(512).config == plan.config


@pytest.mark.parametrize("failure", [TooShort("4096 calls take no time"), RuntimeError("Mosaic failed\n  to compile")])
def test_a_token_count_that_fails_is_named_and_goes_by_the_rule(failure, home, caplog):
    clock = Clock({("ragged", 64): 50.0, ("fused", 128): failure, ("ragged", 512): failure})
    after = start(options(), clock)
    assert paths(after) == ["ragged", "fused", "ragged", "fused"], "as without the option, but for 64"
    assert [row.key.num_tokens for row in read(home, V6E).entries] == [64]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    shown = " ".join(str(failure).split())
    assert warnings == [
        f"MoE warm-up: {tokens} tokens could not be measured, the rule decides: {type(failure).__name__}: {shown}"
        for tokens in (128, 512)
    ]


def test_times_that_cannot_be_kept_still_decide(home, caplog):
    moe = options()
    warm_up = WarmUp(moe, layer(moe), SERVED, Clock({("ragged", 64): 50.0}))
    table_path(home, "v6e", KERNEL).write_text("{")
    assert paths(warm_up.run(params()))[0] == "ragged"
    assert "the times for 64 tokens are not kept: The tuning table" in caplog.text
    assert table_path(home, "v6e", KERNEL).read_text() == "{"


def test_both_ways_run_in_the_timed_loop_and_compute_the_same():
    """On simulated devices: what is handed to the clock is one layer, once by the kernel and once by XLA."""
    results = {}

    def compute(way, arguments):
        out = chained(way)(1, *arguments)
        assert out.sharding.is_equivalent_to(arguments[0].sharding, 2)
        ids = np.asarray(arguments[1].expert_ids)
        assert all(len(set(row)) == CONFIG.top_k for row in ids.tolist())
        assert set(ids.flat) == set(range(CONFIG.num_experts))
        results[way.plan.path] = np.asarray(out, np.float32)
        return Timing(1.0, 0.0, 1)

    moe = options()
    on_tpu = layer(moe)
    simulated = layer(MoEOptions(), cpu_chip())
    experts = dataclasses.replace(on_tpu, fused=simulated.fused, others=simulated.others)
    WarmUp(moe, experts, (16,), compute).run(params())
    assert list(results) == ["fused", "ragged"]
    assert np.abs(results["ragged"]).max() > 0.1
    np.testing.assert_allclose(results["fused"], results["ragged"], atol=0.02 * np.abs(results["ragged"]).max())


def test_tokens_are_the_same_at_every_start(tmp_path):
    seen = []

    def record(way, arguments):
        seen.append([np.asarray(one).tobytes() for one in jax.tree.leaves(arguments[:2])])
        return Timing(1.0, 0.0, 1)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        start(options(tmp_path / name), record, (64,))
    assert all(one == seen[0] for one in seen)
