"""`bench moe`: what its table and verdict say of given times, how it measures, and the command on a tiny layer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_serve.bench import moe
from tpu_serve.bench.moe_cases import LAYERS, Case, Layer, make_cases, read_layer
from tpu_serve.bench.moe_rows import HEADINGS, Row, text, verdict, warnings
from tpu_serve.cli.main import main
from tpu_serve.config import EMBEDDED_MODEL, ConfigError
from tpu_serve.layers.moe.backends import Dense
from tpu_serve.moe_plan.portable import portable

TINY = Layer("4x2x16x8", 4, 2, 16, 8)
GIB = 2**30


def row(dense, ragged, chosen="ragged", num_tokens=8, difference=0.0, gathered=(90.0,)):
    samples = {"dense": tuple(dense), "ragged": tuple(ragged), "gathered": tuple(gathered), "empty": (0.25,)}
    return Row(Case(TINY, "float32", num_tokens, 3), samples, chosen, difference)


FASTER_DENSE = row([1.0, 2.0, 3.0], [8.0, 9.0, 7.0], num_tokens=1)
FASTER_RAGGED = row([30.0, 20.0, 40.0], [20.0, 12.0, 28.0])


def test_a_row_compares_medians_and_middle_halves():
    assert FASTER_DENSE.ratio == 2 / 8
    assert FASTER_DENSE.fastest == "dense"
    assert FASTER_DENSE.loss == 4, "ragged is chosen and takes 8 ms where 2 would do"
    assert FASTER_DENSE.is_clear
    assert FASTER_RAGGED.ratio == 1.5
    assert FASTER_RAGGED.fastest == "ragged"
    assert FASTER_RAGGED.loss == 1
    assert FASTER_RAGGED.middle_half("dense") == (25, 35)
    assert FASTER_RAGGED.middle_half("ragged") == (16, 24)
    assert FASTER_RAGGED.is_clear
    assert not row([30.0, 20.0, 40.0], [20.0, 12.0, 30.1]).is_clear, "25.05 is above 25"
    assert row([3.0], [2.0], gathered=(1.0,)).fastest == "gathered"
    assert not row([30.0, 20.0, 40.0], [20.0, 12.0, 28.0], gathered=(23.0, 25.0)).is_clear, "of the third one too"


def test_the_table_has_the_times_the_ratio_and_both_choices():
    lines = text([FASTER_DENSE, FASTER_RAGGED]).splitlines()
    assert lines[0] == "4x2x16x8: 4 experts, 2 of them a token, hidden 16, intermediate 8"
    heading = next(place for place, line in enumerate(lines) if line.split() == " ".join(HEADINGS).split())
    dense, ragged = (line.split() for line in lines[heading + 2 : heading + 4])
    assert (
        " ".join(dense)
        == "4x2x16x8 float32 1 3 2.000 1.500 - 2.500 8.000 7.500 - 8.500 90.0 90.0 - 90.0 0.250 0.25 dense ragged 4.00"
    )
    assert (
        " ".join(ragged)
        == "4x2x16x8 float32 8 3 30.0 25.0 - 35.0 20.0 16.0 - 24.0 90.0 90.0 - 90.0 0.250 1.50 ragged ragged 1.00"
    )
    assert "dense?" not in text([FASTER_DENSE])
    assert "ragged?" in text([row([30.0, 20.0, 40.0], [20.0, 12.0, 30.1])])
    assert "A CPU only simulates" in text([FASTER_DENSE])
    assert lines[-1] == verdict([FASTER_DENSE, FASTER_RAGGED])


def test_the_verdict_is_the_geometric_mean_and_the_worst():
    rows = [FASTER_RAGGED, FASTER_DENSE, row([1.0], [2.0], "dense"), row([5.0], [2.0], "dense")]  # 1, 4, 1, 2.5
    assert verdict(rows) == (
        "The plan takes the fastest one in 2 of 4 rows; its choices take 1.78 times the time of the fastest ones (geometric mean), "
        "4.00 times at worst (4x2x16x8, float32, 1 token)."
    )
    assert verdict([FASTER_RAGGED]) == "The plan takes the fastest one in 1 of 1 rows: it loses nothing."


@pytest.mark.parametrize("difference", [0.01, float("nan")])
def test_results_that_differ_are_a_warning(difference):
    wrong = row([1.0], [2.0], difference=difference)
    assert warnings([FASTER_DENSE]) == []
    assert len(warnings([FASTER_DENSE, wrong])) == 1
    assert "WARNING: 4x2x16x8, float32, 8 tokens: the results differ" in text([wrong])


def test_programs_are_called_in_turn_with_one_round_unmeasured(monkeypatch):
    called, now = [], [0.0]
    costs = {"dense": 0.003, "ragged": 0.001, "gathered": 0.002, "empty": 0.0005}

    def program(name):
        def run(x, routing, weights):
            called.append((name, float(x[0, 0])))
            now[0] += costs[name]
            return jnp.ones_like(x)

        return run

    monkeypatch.setattr(moe, "_programs", lambda: {name: program(name) for name in costs})
    rounds = []
    cases = [Case(TINY, "float32", 2), Case(TINY, "float32", 4)]
    found = moe.measure(
        cases,
        4,
        lambda num_tokens, *_: "dense" if num_tokens < 3 else "ragged",
        lambda: rounds.append(1),
        lambda: now[0],
    )
    assert len(rounds) == 2 * (4 + 1)
    assert [one.chosen for one in found] == ["dense", "ragged"]
    for one in found:
        assert {name: len(samples) for name, samples in one.samples_ms.items()} == dict.fromkeys(costs, 4)
        assert one.ratio == pytest.approx(3)
    first = called[: 4 * 5]
    assert [name[0] for name, _ in first] == list("drge" + "drge" + "rged" + "gedr" + "edrg"), (
        "another one begins each round"
    )
    assert len({value for _, value in first}) == 5, "one new input a round, the same for all programs"


def test_padding_goes_to_no_expert_and_the_rest_to_different_ones():
    case = Case(TINY, "bfloat16", 64, 24)
    x, routing = moe._tokens(case, np.random.default_rng(0), jax.devices()[0])
    ids, shares = np.asarray(routing.expert_ids), np.asarray(routing.weights)
    assert x.dtype == jnp.bfloat16
    assert (ids[40:] == -1).all()
    assert (shares[40:] == 0).all()
    assert all(len(set(row)) == 2 and set(row) <= set(range(4)) for row in ids[:40].tolist())
    np.testing.assert_allclose(shares[:40].sum(axis=1), 1, atol=1e-6)
    assert set(ids[:40].ravel()) == set(range(4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_measured_row(dtype):
    (found,) = moe.measure([Case(TINY, dtype, 3, 1)], 1, lambda num_tokens, *_: portable(num_tokens))
    assert found.chosen == "gathered"
    assert all(len(samples) == 1 and samples[0] > 0 for samples in found.samples_ms.values())
    assert warnings([found]) == []


def test_a_backend_that_computes_something_else_is_found(monkeypatch):
    wrong = Dense()
    monkeypatch.setattr(moe, "Ragged", lambda chip_is_tpu: lambda *arguments: wrong(*arguments) * 1.01)
    assert moe.measure([Case(TINY, "float32", 3)], 1, lambda *_: "ragged")[0].difference == pytest.approx(
        0.01, rel=1e-3
    )


def test_the_first_layer_is_the_embedded_model_s():
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    names = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    assert LAYERS["tiny-chat"] == Layer("tiny-chat", *(config[name] for name in names))


def test_cases():
    assert read_layer("8-experts") is LAYERS["8-experts"]
    assert read_layer("4x2x16x8") == TINY
    cases = make_cases([TINY, TINY], ["float32"], [1, 10, 10], 95, GIB)
    assert cases == [Case(TINY, "float32", 1, 0), Case(TINY, "float32", 10, 9)]
    big = Layer("big", 8, 2, 1024, 1024)
    assert Case(big, "bfloat16", 1).num_bytes == 3 * 8 * 2**20 * 6 + 8 * 4 * 1024 * 4
    with pytest.raises(ConfigError, match=r"--workload big with --num-tokens 4096 needs .* GiB in bfloat16"):
        make_cases([big], ["bfloat16"], [1, 4096], 0, GIB)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "nine"], "--workload nine: unknown; give tiny-chat, 8-experts"),
        (["--workload", "8x2x16"], "--workload 8x2x16: unknown"),
        (["--workload", "8x0x16x16"], "--workload 8x0x16x16: unknown"),
        (["--workload", "2x4x16x16"], "--workload 2x4x16x16: a token cannot go to 4 of 2 experts"),
        (["--workload", "1000x2x9000x9000"], "--workload 1000x2x9000x9000 with --num-tokens 1 needs"),
        (["--num-tokens", "0"], "argument --num-tokens: '0' is not a positive integer"),
        (["--num-iters", "-1"], "argument --num-iters"),
        (["--dtype", "float16"], "--dtype float16: unknown; give float32 or bfloat16"),
        (["--padding", "100"], "--padding 100 must be between 0 and 99"),
        (["--output-json", "no/such/folder/file"], "--output-json no/such/folder/file cannot be written"),
        (["--num-token", "1"], "unknown flag --num-token; did you mean --num-tokens?"),
    ],
)
def test_what_makes_no_sense_is_one_line_that_names_the_flag(words, message, capsys, monkeypatch):
    monkeypatch.setattr(moe, "measure", lambda *_: pytest.fail("measured"))
    assert main(["bench", "moe", *words]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_the_command(capsys, tmp_path):
    file = tmp_path / "moe.json"
    words = [
        "--workload",
        "4x2x16x8",
        "--num-tokens",
        "4",
        "--dtype",
        "bfloat16",
        "--padding",
        "50",
        "--num-iters",
        "1",
    ]
    assert main(["bench", "moe", *words, "--output-json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "platform cpu" in shown
    document = json.loads(file.read_text())
    assert document["verdict"] == shown.splitlines()[-1]
    assert document["settings"] == {"num_iters": 1, "padding_percent": 50}
    found = [(one["dtype"], one["num_tokens"], one["num_padding"], one["chosen"]) for one in document["results"]]
    assert found == [("bfloat16", 4, 2, "gathered")]
    (one,) = document["results"]
    assert one["ratio"] == one["median_ms"]["dense"] / one["median_ms"]["ragged"]
    assert [len(samples) for samples in one["samples_ms"].values()] == [1, 1, 1, 1]


def test_results_that_differ_are_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(moe, "measure", lambda *_: [row([1.0], [2.0], difference=1.0)])
    assert main(["bench", "moe", "--workload", "4x2x16x8"]) == 1
    assert "WARNING" in capsys.readouterr().out
