"""Which configs the tuner tries: legal ones, the heuristic's first, within the budget, and none that is calculated to be slow."""

import pytest

from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.heuristic import heuristic
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.tuner.estimate import estimate
from tpu_serve.tuner.search import PRUNED_FROM, Search, neighbours

V6E = TPU_CHIPS["v6e"]
CASES = [
    ("Qwen3-30B-A3B", "v6e", "bfloat16", 16),
    ("Qwen3-30B-A3B", "v6e", "bfloat16", 4096),
    ("Qwen3-235B-A22B", "tpu7x", "fp8_channel", 1024),
    ("GPT-OSS-120B", "tpu7x", "mxfp4", 256),
    ("Gemma4-26B-A4B", "v5e", "int8_channel", 512),
]


def problem_of(workload="Qwen3-30B-A3B", chip="v6e", format="bfloat16", num_tokens=4096):
    return WORKLOADS[workload].problem(num_tokens, 8, format), TPU_CHIPS[chip]


def everything(search, score):
    """Configs in the order in which they are asked for; `score` of each is told."""
    found = []
    while (config := search.ask()) is not None:
        assert search.ask() == config, "asking changes nothing"
        found.append(config)
        search.tell(config, score(config))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_all_are_legal_and_different_and_the_heuristics_is_the_first(case):
    problem, chip = problem_of(*case)
    search = Search(problem, chip, 60)
    found = everything(search, lambda config: estimate(problem, config, chip).seconds)
    assert found[0] == search.first == heuristic(problem, chip)
    assert len(set(found)) == len(found) > 5
    assert [check(problem, config, chip) for config in found] == [None] * len(found)
    best = min(estimate(problem, config, chip).seconds for config in found)
    assert all(estimate(problem, config, chip).seconds > PRUNED_FROM * best for config in search.pruned - set(found))


def test_neighbours_that_do_not_fit_are_left_out():
    """Experts of which hardly a tile fits the VMEM of a tpu7x."""
    problem, chip = problem_of("Qwen3-Coder-480B-A35B", "tpu7x", "bfloat16", 4096)
    search = Search(problem, chip, 40, lambda config: 1.0)
    found = everything(search, lambda config: 1.0)
    assert [check(problem, config, chip) for config in found] == [None] * len(found)
    near = [config for some in neighbours(problem, search.first).values() for config in some]
    assert sum(check(problem, config, chip) is not None for config in near) >= 3


@pytest.mark.parametrize("limit", [1, 3])
def test_the_budget(limit):
    problem, chip = problem_of()
    assert len(everything(Search(problem, chip, limit), lambda config: None)) == limit, "failed ones count too"


def test_it_goes_downhill_in_every_coordinate():
    """A score with one best config, far from the heuristic's in several coordinates."""
    problem, chip = problem_of()
    wanted = {"tile_columns": 256, "tile_rows": 32, "block_rows": 192, "dispatch": "dedup_push", "resident": False}

    def score(config):
        off = sum(getattr(config, name) != value for name, value in wanted.items() if name != "block_rows")
        return (
            1
            + off
            + abs(config.block_rows - 192) / 1000
            + abs(config.tile_columns - 256) / 1000
            + config.tile_rows / 1e4
        )

    search = Search(problem, chip, 200, lambda config: 1.0)
    found = everything(search, score)
    chosen = search.chosen()
    assert {name: getattr(chosen, name) for name in wanted} == wanted
    assert len(found) < 150


def test_every_coordinate_has_its_turn_before_one_has_a_second():
    problem, chip = problem_of()
    search = Search(problem, chip, 9, lambda config: 1.0)
    first, *others = everything(search, lambda config: 1.0)
    near = neighbours(problem, first)
    legal = {name for name, found in near.items() if any(check(problem, config, chip) is None for config in found)}
    tried = [next(name for name, found in near.items() if config in found) for config in others]
    assert len(tried) == 8
    assert set(tried[: len(legal)]) == legal


def test_the_other_mode_is_tried():
    problem, chip = problem_of(num_tokens=256)
    found = everything(Search(problem, chip, 12, lambda config: 1.0), lambda config: 1.0)
    assert {config.mode for config in found} == {"D", "G"}


def test_what_is_calculated_to_be_slow_is_left_out():
    problem, chip = problem_of()
    search = Search(problem, chip, 50, lambda config: 1.0 if config.combine == "push" else 1.16)
    found = everything(search, lambda config: 1.0)
    assert {config.combine for config in found if config.mode == "G"} == {"push"}
    assert {config.combine for config in search.pruned} == {"rs"}
    search = Search(problem, chip, 50, lambda config: 1.0 if config.combine == "push" else 1.14)
    assert any(config.combine == "rs" for config in everything(search, lambda config: 1.0))


def test_nothing_is_left_out_while_nothing_works():
    problem, chip = problem_of()
    search = Search(problem, chip, 30, lambda config: 1.0 if config.combine == "push" else 9.0)
    assert any(config.combine == "rs" for config in everything(search, lambda config: None))
    assert search.chosen() is None


@pytest.mark.parametrize(("score", "stays"), [(0.979, False), (0.981, True)])
def test_the_heuristics_config_stays_unless_it_is_beaten_by_two_percent(score, stays):
    problem, chip = problem_of()
    search = Search(problem, chip, 4)
    found = everything(search, lambda config: 1.0 if config == search.first else score)
    assert search.chosen() == (search.first if stays else found[1])
    assert search.chosen(0.05) == search.first


def test_where_the_heuristics_config_does_not_work_the_best_one_is_taken():
    problem, chip = problem_of()
    search = Search(problem, chip, 4)
    found = everything(search, lambda config: None if config == search.first else float(config.tile_columns))
    assert search.chosen() == min(found[1:], key=lambda config: config.tile_columns)


def test_a_problem_without_a_legal_config_is_an_error():
    problem, chip = problem_of(format="fp8_channel")
    with pytest.raises(ValueError, match="no arithmetic"):
        Search(problem, chip, 8)
