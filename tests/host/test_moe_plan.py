"""How an expert layer runs: every plan legal or refused with a reason, rows looked up by rule, thresholds, and what is said of it."""

import dataclasses
import itertools
import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_plan_golden import FILE, golden_text

from tpu_serve.config import ConfigError, MoEOptions
from tpu_serve.device.chip import TPU_CHIPS, cpu_chip
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import check, supports
from tpu_serve.kernels.fused_moe_v2.problem import PostNorm
from tpu_serve.moe_plan import planner as planner_module
from tpu_serve.moe_plan.key import BUCKETS, KERNEL, key_of, problem_of_key, read_tiles
from tpu_serve.moe_plan.layer import MoELayer, Policy, problem_of
from tpu_serve.moe_plan.lookup import Rows, find
from tpu_serve.moe_plan.path import without_xla
from tpu_serve.moe_plan.plan import plan_layer
from tpu_serve.moe_plan.planner import Planner
from tpu_serve.moe_plan.rows import rows_of, tables_of
from tpu_serve.moe_plan.text import table
from tpu_serve.tuning_tables.table import Entry, Provenance, Table, Threshold

V6E = TPU_CHIPS["v6e"]
LAYER = MoELayer.of_workload(WORKLOADS["Qwen3-30B-A3B"], "bfloat16")
COMPILED = Provenance("compiled", "2026-11-30", "0.10.2")
NO_ROWS = Rows()


def measured(**changes):
    known = {"jax": "0.10.2", "us": 100.0, "us_xla": 150.0, "iterations": 20, "spread": 0.01}
    return Provenance("measured", "2026-11-30", **{**known, **changes})


def config_at(num_tokens, layer=LAYER, chip=V6E):
    """The rule's config, with one slot more, so that it can be told from the rule's."""
    found = heuristic(problem_of(layer, num_tokens, 8, Policy(sequence_parallel=True)), chip)
    return dataclasses.replace(found, ring_slots=found.ring_slots + 1)


def row(num_tokens, config=None, provenance=COMPILED, least=None, layer=LAYER):
    key = key_of(problem_of(layer, num_tokens, 8, Policy()))
    return Entry(key, config or config_at(num_tokens, layer), provenance, least)


def rows(*entries, thresholds=(), **given):
    return Rows([Table(KERNEL, "v6e", V6E.vmem_bytes, entries, thresholds)], **{"jax": "0.10.2", **given})


def plan(num_tokens, known=NO_ROWS, layer=LAYER, num_devices=8, chip=V6E, **policy):
    return plan_layer(layer, num_tokens, num_devices, chip, Policy(**policy), known)


def test_needs_no_jax():
    code = (
        "import sys, tpu_serve.moe_plan.planner, tpu_serve.moe_plan.rows, tpu_serve.moe_plan.text;"
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def refusal_of(ask):
    """The words of the error that it raises, None where it answers."""
    try:
        ask()
    except ValueError as error:  # ConfigError is one
        return str(error)
    return None


@settings(max_examples=300, deadline=None)
@given(
    chip=st.sampled_from(list(TPU_CHIPS.values())),
    workload=st.sampled_from(list(WORKLOADS.values())),
    format=st.sampled_from(list(FORMATS)),
    num_devices=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    num_tokens=st.one_of(st.integers(1, 40000), st.sampled_from(BUCKETS)),
    sequence_parallel=st.booleans(),
    post_norm=st.sampled_from([None, None, PostNorm(1e-6)]),
)
def test_every_plan_is_legal_or_refused_with_a_reason(
    chip, workload, format, num_devices, num_tokens, sequence_parallel, post_norm
):
    layer = dataclasses.replace(MoELayer.of_workload(workload, format), post_norm=post_norm)
    if format == "float32":
        layer = dataclasses.replace(layer, dtype="float32")
    known = SHIPPED[chip.name]
    problem = problem_of(layer, num_tokens, num_devices, Policy(sequence_parallel=sequence_parallel))
    without = refusal_of(lambda: heuristic(problem, chip)) if without_xla(problem) is not None else None
    if without is not None:  # neither the kernel nor XLA can
        refused = refusal_of(
            lambda: plan(num_tokens, known, layer, num_devices, chip, sequence_parallel=sequence_parallel)
        )
        assert without in refused
        assert without_xla(problem) in refused
        return
    made = plan(num_tokens, known, layer, num_devices, chip, sequence_parallel=sequence_parallel)
    if made.path == "fused":
        assert check(made.problem, made.config, chip) is None
        assert made.source in ("exact", "bucket", "near", "heuristic")
        assert made.vmem_bytes <= chip.vmem_bytes
        assert made.smem_bytes <= chip.smem_bytes
        assert (made.ici_bytes > 0) == (num_devices > 1)
    else:
        assert without_xla(problem) is None
        assert made.config is None
        assert dict(made.refusals)["fused"]
        if (reason := supports(made.problem, chip)) is not None:
            assert dict(made.refusals)["fused"] == reason
    assert made.reason
    assert made.hbm_bytes > 0
    json.dumps(made.as_json())


SHIPPED = {name: rows_of(name) for name in TPU_CHIPS}


@pytest.mark.parametrize("chip", list(TPU_CHIPS))
def test_every_shipped_row_is_legal_and_is_what_its_own_problem_gets(chip):
    for found in SHIPPED[chip]:
        key = found.key
        problem = problem_of_key(key)
        assert key_of(problem) == key
        answer = find(problem, TPU_CHIPS[chip], SHIPPED[chip])
        assert (answer.source, answer.config, answer.row) == ("exact", found.value, found)


def test_its_own_row_comes_first_then_the_nearest_above_and_never_one_from_below():
    known = rows(row(64), row(128), row(4096))
    assert find(problem_of(LAYER, 128, 8, Policy()), V6E, known).source == "exact"
    above = find(problem_of(LAYER, 100, 8, Policy()), V6E, known)
    assert (above.source, above.row.key.num_tokens) == ("bucket", 128)
    assert find(problem_of(LAYER, 8192, 8, Policy()), V6E, known).source == "heuristic"


def test_only_a_measured_row_reaches_beyond_its_bucket():
    """What was only compiled for many more tokens knows less of so few than the rule, which is asked for their very number."""
    at_1100 = problem_of(LAYER, 1100, 8, Policy())
    assert find(at_1100, V6E, rows(row(4096))).source == "heuristic"
    found = find(at_1100, V6E, rows(row(4096, provenance=measured()), row(8192, provenance=measured())))
    assert (found.source, found.row.key.num_tokens) == ("bucket", 4096)


def test_a_row_of_the_other_mode_is_not_taken_across_the_border():
    known = rows(row(512, provenance=measured()))
    assert known.exact(key_of(problem_of(LAYER, 512, 8, Policy()))).value.mode == "G"
    at_200 = find(problem_of(LAYER, 200, 8, Policy()), V6E, known)
    assert (at_200.config.mode, at_200.source) == ("D", "heuristic")
    assert find(problem_of(LAYER, 300, 8, Policy()), V6E, known).source == "bucket"


def test_a_layer_of_the_same_sizes_answers_by_the_load_of_an_expert():
    few, many = (dataclasses.replace(LAYER, num_experts=experts) for experts in (64, 512))
    known = rows(row(1024, layer=few), row(8192, layer=many), row(1024, layer=many))
    found = find(problem_of(LAYER, 2048, 8, Policy()), V6E, known)  # 128 rows an expert
    assert found.source == "near"
    assert (found.row.key.num_experts, found.row.key.num_tokens) in ((64, 1024), (512, 8192))
    assert find(problem_of(LAYER, 512, 8, Policy()), V6E, known).row.key.rows_per_expert == 16  # of 32
    assert find(problem_of(LAYER, 32768, 8, Policy()), V6E, known).source == "heuristic", "2048 rows are not like 128"
    timed = rows(row(16384, layer=many, provenance=measured()))
    assert find(problem_of(LAYER, 32768, 8, Policy()), V6E, timed).source == "near", "but measured ones are worth more"
    other = dataclasses.replace(LAYER, intermediate=1024)
    assert find(problem_of(other, 2048, 8, Policy()), V6E, known).source == "heuristic"


def test_a_row_that_is_not_legal_for_the_real_shape_is_passed_over_with_the_reason():
    wrong = dataclasses.replace(config_at(64), tile_columns=640)
    found = find(problem_of(LAYER, 64, 8, Policy()), V6E, rows(row(64, wrong)))
    assert found.source == "heuristic"
    assert len(found.passed_over) == 1
    assert "the row for 64 tokens: tile_columns 640 must be a multiple of 128 that divides 768" in found.passed_over[0]
    big = dataclasses.replace(config_at(4096), block_rows=8192)
    found = find(problem_of(LAYER, 4096, 8, Policy()), V6E, rows(row(4096, big)))
    assert "MiB of VMEM; v6e has" in found.passed_over[0]


def test_without_sequence_parallelism_nothing_is_dispatched_and_the_rest_of_a_row_holds():
    config = dataclasses.replace(config_at(1024), dispatch="push_ag", rounds=2)
    known = rows(row(1024, config))
    assert find(problem_of(LAYER, 1024, 8, Policy(sequence_parallel=True)), V6E, known).config == config
    found = find(problem_of(LAYER, 1024, 8, Policy()), V6E, known)
    assert (found.source, found.config) == ("exact", dataclasses.replace(config, dispatch="xla_ag", rounds=1))


def test_measured_beats_compiled_and_a_users_folder_the_package():
    mine = dataclasses.replace(config_at(64), ring_slots=4)
    package = Table(KERNEL, "v6e", V6E.vmem_bytes, (row(64),))
    user = Table(KERNEL, "v6e", V6E.vmem_bytes, (row(64, mine),))
    key = key_of(problem_of(LAYER, 64, 8, Policy()))
    assert Rows([user, package], jax="0.10.2").exact(key).value == mine
    better = Table(KERNEL, "v6e", V6E.vmem_bytes, (row(64, provenance=measured()),))
    assert Rows([user, better], jax="0.10.2").exact(key).provenance.kind == "measured"
    assert Rows([user, better], jax="0.11.0").exact(key).value == mine, "measured with another JAX"
    elsewhere = Table(KERNEL, "v6e", V6E.vmem_bytes, (row(64, provenance=measured(host="there")),))
    assert Rows([elsewhere], host="here").exact(key) is None
    assert Rows([elsewhere], host="there").exact(key) is not None


def test_which_token_counts_the_kernel_takes_where_nobody_measured():
    taken = {tokens: plan(tokens).way for tokens in (1, 256, 257, 511, 512, 32768)}
    assert taken == {1: "fused D", 256: "fused D", 257: "ragged", 511: "ragged", 512: "fused G", 32768: "fused G"}
    assert {plan(tokens, num_devices=1).path for tokens in (1, 256, 4096)} == {"ragged"}
    assert plan(64, num_devices=1).reason == "not fused: on one device nothing travels between experts"
    assert [plan(tokens, chip=cpu_chip()).path for tokens in (1, 4096)] == ["gathered", "ragged"]


def test_a_measured_threshold_decides_within_its_bucket():
    known = rows(
        row(1024, provenance=measured(), least=700), row(64, provenance=measured(us=99.0, us_xla=50.0), least=65)
    )
    assert plan(600, known).path == "ragged"
    assert "it pays from 700 tokens (100 us against 150 us of XLA, measured at 1024 tokens)" in plan(600, known).reason
    assert plan(700, known).path == plan(1024, known).path == "fused"
    assert plan(64, known).path == "ragged", "XLA was faster, although mode D is expected to pay"
    assert plan(100, known).path == "fused"


def test_what_was_measured_decides_for_its_own_bucket_only():
    """Tiles may be borrowed from further above; how they compare with XLA there says nothing about so few tokens."""
    far = rows(row(32768, provenance=measured(us=800.0, us_xla=1400.0), least=0))
    assert plan(300, far).path == "ragged"
    assert plan(600, far).way == "fused G", "by the rule"
    assert "measured" not in plan(600, far).reason.replace("not measured", "")
    near = rows(row(256, provenance=measured(us=130.0, us_xla=129.0), least=257))
    assert plan(8, near).path == "fused"
    assert plan(200, near).path == plan(256, near).path == "ragged"


def test_in_its_bucket_a_row_of_the_other_mode_counts():
    gathered = config_at(512)
    known = rows(row(256, gathered, measured(), least=0))
    for tokens in (200, 255, 256):
        assert plan(tokens, known).config.mode == "G", tokens
    assert "100 us against 150 us of XLA" in plan(200, known).reason
    assert plan(100, known).config.mode == "D"


def test_what_was_measured_with_another_jax_does_not_decide():
    old = measured(us=130.0, us_xla=60.0, jax="0.9.4")
    assert plan(64, rows(row(64, provenance=old, least=65))).path == "fused"
    assert plan(64, rows(row(64, provenance=old, least=65), jax="0.9.9")).path == "ragged"
    at_1100 = problem_of(LAYER, 1100, 8, Policy())
    assert find(at_1100, V6E, rows(row(4096, provenance=old))).source == "heuristic"

    def taken(**changes):
        threshold = Threshold(2048, 768, 128, 8, 8, "bfloat16", 4096, measured(**changes))
        return plan(2048, rows(thresholds=(threshold,), host="here")).path

    assert taken() == "ragged"
    assert taken(host="here") == "ragged"
    assert taken(host="there") == "fused"
    assert taken(jax="0.9.4") == "fused"


def test_what_xla_cannot_run_goes_to_the_kernel_at_every_token_count():
    normed = dataclasses.replace(LAYER, post_norm=PostNorm(1e-6))
    made = plan(300, layer=normed)
    assert made.path == "fused"
    assert "nothing else can (not ragged: XLA's layer has no norm of experts' rows" in made.reason
    assert plan(300, unavailable={"ragged": "no", "dense": "no"}).path == "fused"
    with pytest.raises(ConfigError, match="--moe-backend ragged cannot run this model: XLA's layer has no norm"):
        plan(64, layer=normed, backend="ragged")
    with pytest.raises(ConfigError, match=r"fused: format fp8_channel has products .* ragged: XLA's layer has no norm"):
        plan(64, layer=dataclasses.replace(normed, format="fp8_channel"))


def test_quantised_experts_go_to_the_kernel_wherever_it_runs_their_format():
    """XLA has to widen all of them first, whatever the tokens."""
    quantised = dataclasses.replace(LAYER, format="int8_channel")
    for tokens, num_devices in ((8, 1), (300, 1), (300, 8), (4096, 8)):
        made = plan(tokens, layer=quantised, num_devices=num_devices)
        assert made.path == "fused"
        assert "XLA would widen all experts from int8 to bfloat16 at every call" in made.reason or tokens != 300
    slower = rows(row(256, provenance=measured(us=130.0, us_xla=129.0), least=257, layer=quantised))
    assert plan(256, slower, quantised).path == "ragged", "what was measured decides"
    made = plan(64, layer=dataclasses.replace(LAYER, format="fp8_channel"))
    assert made.path == "ragged"
    assert made.reason.startswith("not fused: format fp8_channel has products in float8_e4m3fn, which v6e has no")
    assert plan(64, layer=quantised, backend="dense").path == "dense"


def test_widening_is_counted():
    layer = dataclasses.replace(LAYER, format="int8_channel")
    plain, widened = (plan(1, layer=one, num_devices=1, backend="ragged").hbm_bytes for one in (LAYER, layer))
    values = 128 * 3 * 2048 * 768
    scales = 128 * (2 * 768 + 2048) * 4
    assert widened - plain == values + scales + 2 * values, "read as bytes and written in two; then the same is read"


def test_biases_and_activations_are_no_reason_against_xla():
    layer = MoELayer.of_workload(WORKLOADS["GPT-OSS-120B"], "bfloat16")
    assert plan(300, layer=layer).path == "ragged"
    assert plan(64, layer=layer, backend="ragged").path == "ragged"


def test_a_reason_fits_the_mode_that_runs():
    """Rows filled up to more than mode D takes are gathered, whatever the number of tokens before."""
    for num_devices in (3, 6, 16, 128):
        for workload in WORKLOADS.values():
            layer = MoELayer.of_workload(workload, "bfloat16")
            for tokens in (1, 64, 256):
                made = plan(tokens, layer=layer, num_devices=num_devices, chip=TPU_CHIPS["tpu7x"])
                if "the speed of reading the weights" in made.reason:
                    assert made.config.mode == "D"


@settings(max_examples=100, deadline=None)
@given(least=st.integers(0, 1100), tokens=st.integers(513, 1024), more=st.integers(0, 500), raised=st.integers(0, 500))
def test_a_threshold_is_monotone(least, tokens, more, raised):
    """More tokens of a bucket never go back to XLA, and a higher threshold never brings any to the kernel."""

    def is_fused(tokens, least):
        return plan(tokens, rows(row(1024, provenance=measured(), least=least))).path == "fused"

    if is_fused(tokens, least):
        assert is_fused(min(1024, tokens + more), least)
    else:
        assert not is_fused(tokens, least + raised)


@pytest.mark.parametrize("chip", list(TPU_CHIPS))
def test_by_rule_the_kernel_leaves_one_gap_at_most(chip):
    """So few tokens, or so many: whatever the layer, at most three regimes follow one another."""
    for workload in WORKLOADS.values():
        for format in workload.formats(chip):
            layer = MoELayer.of_workload(workload, format)
            paths = [
                plan(tokens, SHIPPED[chip], layer, 8, TPU_CHIPS[chip]).path
                for tokens in (*range(8, 600, 8), *BUCKETS[7:])
            ]
            assert [path for path, _ in itertools.groupby(paths)] in (["fused", "ragged", "fused"], ["fused"])


def test_a_ported_threshold_moves_only_the_mode_that_gathers():
    source = Provenance("ported", "2026-06-01", us=180.0, us_xla=230.0, source="https://example.org")
    threshold = Threshold(2048, 768, 128, 8, 8, "bfloat16", 1024, source)
    known = rows(thresholds=(threshold,))
    assert {tokens: plan(tokens, known).path for tokens in (256, 512, 1023, 1024)} == {
        256: "fused", 512: "ragged", 1023: "ragged", 1024: "fused",
    }  # fmt: skip
    assert "https://example.org" in plan(512, known).reason
    assert plan(512, known, num_devices=4).path == "fused", "measured on eight devices"
    assert plan(512, known, dataclasses.replace(LAYER, format="int8_channel")).path == "fused", "of other weights"


def test_shipped_thresholds_are_published_ones_with_their_source():
    found = [one for name in TPU_CHIPS for table in tables_of(name) for one in table.thresholds]
    assert found
    for threshold in found:
        assert threshold.provenance.kind == "ported"
        assert threshold.provenance.source.startswith("https://")
        assert threshold.provenance.us < threshold.provenance.us_xla, "the kernel was ahead there"


def test_a_backend_that_is_named_runs_everywhere_or_is_refused():
    assert {plan(tokens, backend="fused").path for tokens in (64, 300, 4096)} == {"fused"}
    assert plan(64, backend="fused", num_devices=1).way == "fused D"
    assert plan(300, backend="dense").path == "dense"
    with pytest.raises(
        ConfigError, match="--moe-backend fused cannot run this model: for 64 tokens format fp8_channel"
    ):
        plan(64, backend="fused", layer=dataclasses.replace(LAYER, format="fp8_channel"))
    with pytest.raises(ConfigError, match="--moe-backend dense cannot run this model: no"):
        plan(64, backend="dense", unavailable={"dense": "no"})
    with pytest.raises(ConfigError, match="--moe-backend auto cannot run this model: fused: a; ragged: b; dense: c"):
        plan(64, unavailable={"fused": "a", "ragged": "b", "dense": "c"})


def test_tiles_that_are_given_run_where_they_are_legal():
    tiles = Config("D", 384, 2)
    assert plan(64, tiles=tiles).config == tiles
    assert plan(64, tiles=tiles).source == "given"
    assert plan(300, tiles=tiles).reason == "--moe-tiles asks for it", "although XLA would be taken"
    assert plan(300, tiles=dataclasses.replace(tiles, ring_slots=1)).notes, (
        "what is not legal is told where XLA runs too"
    )
    elsewhere = plan(4096, tiles=tiles)
    assert elsewhere.source == "heuristic"
    assert elsewhere.notes == (
        "the tiles given by --moe-tiles are not legal here: mode D is for at most 1024 tokens, not 4096",
    )


def test_tiles_from_the_environment(monkeypatch):
    monkeypatch.setenv("TPU_SERVE_MOE_TILES", '{"mode": "D", "tile_columns": 384, "ring_slots": 2, "compact_rows": 0}')
    assert read_tiles(MoEOptions().tiles) == Config("D", 384, 2)
    with pytest.raises(ConfigError, match="--moe-tiles lacks the field 'tile_columns' of mode D"):
        read_tiles(MoEOptions(moe_tiles={"mode": "D"}).tiles)
    monkeypatch.setenv("TPU_SERVE_MOE_TILES", "[")
    with pytest.raises(ConfigError, match=r"TPU_SERVE_MOE_TILES='\[' is not JSON"):
        read_tiles(MoEOptions().tiles)
    monkeypatch.setenv("TPU_SERVE_MOE_TILES", "[]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        read_tiles(MoEOptions().tiles)


def test_buckets_are_planned_once_and_the_log_says_how_many_have_rows(caplog):
    caplog.set_level(logging.INFO)
    planner = Planner(LAYER, 8, V6E, Policy(), rows(row(64), row(512)))
    planner.prepare([64, 100, 300, 512])
    assert (
        "MoE tuning tables: 2 of 4 token buckets have a row of their own in tuning_tables/v6e/fused_moe_v2.json; missing: 100, 300"
        in caplog.text
    )
    assert caplog.text.count("MoE for ") == 4
    assert "exact (compiled 2026-11-30)" in caplog.text
    assert planner.counts() == {
        ("fused D", "exact"): 1,
        ("fused D", "heuristic"): 1,
        ("ragged", "none"): 1,
        ("fused G", "exact"): 1,
    }
    assert planner.plan(100) is planner.plan(100)


def test_equal_answers_share_a_line_of_the_log(caplog):
    caplog.set_level(logging.INFO)
    Planner(LAYER, 1, cpu_chip()).prepare([8, 16, 256])
    reason = "by rule, not measured; not fused: on a CPU the kernel is only simulated)"
    assert f"MoE for 8, 16 tokens: gathered (gathered {reason}" in caplog.text
    assert f"MoE for 256 tokens: ragged (ragged {reason}" in caplog.text
    assert caplog.text.count("MoE for") == 2
    assert "tables" not in caplog.text, "there are none for a CPU"
    Planner(LAYER, 1, V6E).prepare([8, 16, 256])
    assert "MoE tuning tables: not used, the fused kernel runs for none of 3 token buckets" in caplog.text


def test_strict_tables_make_a_missing_row_an_error():
    known = rows(row(64), row(512))
    Planner(LAYER, 8, V6E, Policy(), known).prepare([64, 512], is_strict=True)
    with pytest.raises(
        ConfigError, match=r"--moe-strict-tables: no row of .* is for 100 tokens of this layer on 8 devices"
    ):
        Planner(LAYER, 8, V6E, Policy(), known).prepare([64, 100, 512], is_strict=True)
    Planner(LAYER, 1, cpu_chip(), Policy(), known).prepare([64, 100], is_strict=True)  # no kernel, no tables
    Planner(LAYER, 8, V6E, Policy(tiles=Config("D", 384, 2)), known).prepare(
        [64, 100], is_strict=True
    )  # nor with tiles


def test_bytes_by_hand():
    """30B on 8 devices at 64 tokens: mode D reads all active experts once; each device sends every other one its 8 tokens and its sums."""
    with_parallelism = plan(64, sequence_parallel=True)
    active = 16 * (1 - (1 - 8 / 128) ** 64)
    assert with_parallelism.hbm_bytes == pytest.approx(active * 3 * 2048 * 768 * 2, rel=1e-6)
    assert with_parallelism.ici_bytes == 7 * 8 * 2048 * 2 * 2
    assert plan(64).ici_bytes == 7 * 8 * 2048 * 2 * 2, "no tokens out, but the finished ones to all"
    quantised = plan(64, layer=dataclasses.replace(LAYER, format="int8_channel"))
    assert quantised.hbm_bytes == pytest.approx(active * (3 * 2048 * 768 + 4 * (2 * 768 + 2048)), rel=1e-6)
    rings = [plan(16384, tiles=Config("G", 256, slots, 256, 256)) for slots in (2, 3)]
    assert rings[0].hbm_bytes - rings[1].hbm_bytes == pytest.approx(3 * 16 * 3 * 2048 * 768 * 2, rel=1e-3), (
        "an expert's 1024 rows come in four blocks, and a ring that does not hold the expert reads it for each"
    )
    once, rounds = (
        plan(16384, sequence_parallel=True, tiles=Config("G", 768, 2, 256, 256, "push_ag", rounds=number))
        for number in (1, 8)
    )
    assert rounds.hbm_bytes - once.hbm_bytes == pytest.approx(7 * 16 * 3 * 2048 * 768 * 2, rel=1e-3), (
        "read in each round"
    )


def test_as_a_table_to_read():
    planner = Planner(LAYER, 8, V6E, Policy(), rows(row(64)))
    planner.prepare([64, 300, 4096])
    lines = table(planner.plans).splitlines()
    assert lines[0].split() == [
        "tokens",
        "path",
        "tiles",
        "from",
        "VMEM",
        "MiB",
        "SMEM",
        "KiB",
        "HBM",
        "MB",
        "ICI",
        "MB",
        "bound",
        "us",
        "limit",
        "why",
    ]
    assert "exact (compiled 2026-11-30)" in lines[1]
    assert lines[2].split()[:2] == ["300", "ragged"]
    assert "fused G" in lines[3]
    assert "nothing here was measured unless the row says so" in lines[-1]


def test_no_choice_moves_unseen():
    """When one does on purpose: `python tests/moe_plan_golden.py`, and look at the difference."""
    assert golden_text() == FILE.read_text()


def test_a_plan_is_worked_out_once(monkeypatch):
    made = []

    def counted(*arguments):
        made.append(arguments[1])
        return plan_layer(*arguments)

    monkeypatch.setattr(planner_module, "plan_layer", counted)
    planner = Planner(LAYER, 8, V6E)
    planner.prepare(BUCKETS)
    for index in range(10_000):
        assert planner.plan(BUCKETS[index % len(BUCKETS)]).num_tokens == BUCKETS[index % len(BUCKETS)]
    assert made == list(BUCKETS)


def test_weights_suit_the_kernel_wherever_a_plan_takes_it():
    """What pads them asks before there is a plan for any bucket."""
    layers = [
        LAYER,
        dataclasses.replace(LAYER, format="int8_channel"),
        MoELayer.of_workload(WORKLOADS["GPT-OSS-120B"], "bfloat16"),
        dataclasses.replace(LAYER, format="fp8_channel"),
        dataclasses.replace(LAYER, post_norm=PostNorm(1e-6)),
    ]
    policies = [
        Policy(),
        Policy(tiles=Config("D", 384, 2)),
        Policy(backend="fused"),
        Policy(unavailable={"fused": "no"}),
        Policy(backend="ragged"),
    ]
    for layer, policy, num_devices in itertools.product(layers, policies, (1, 4)):
        planner = Planner(layer, num_devices, V6E, policy)
        try:
            taken = any(planner.plan(tokens).path == "fused" for tokens in (1, 64, 300, 4096))
        except ConfigError:
            continue
        assert planner.may_run_kernel == taken, (layer, policy, num_devices)
