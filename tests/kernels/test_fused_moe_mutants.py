"""The tests of the fused mixture-of-experts kernel can fail: each deliberate fault is found, and for what it is."""

import dataclasses
import functools

import pytest
from fused_moe_mutants import CASES, MUTANTS, arguments, layer, wrong
from fused_moe_sum import sum_plainly
from simulator import FaultKind, Simulation


@functools.cache
def _simulation(case):
    return Simulation(layer(case))


def _passes(name, modes):
    case = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        sum_plainly(patch)
        simulation = _simulation(dataclasses.replace(case, routing=""))  # one for all routings
        return [wrong(case, output) for output in simulation.run(*arguments(case), modes=modes)] == [None] * len(modes)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_passes(name):
    assert _passes(name, ("on_wait", "eager"))


RUNS = [(mutant, mode) for mutant in MUTANTS for mode in mutant.verdicts]


@pytest.mark.parametrize(("mutant", "mode"), RUNS, ids=[f"{mutant.name}, {mode}" for mutant, mode in RUNS])
def test_the_fault_is_found(mutant, mode):
    assert mutant.verdict(mode) == mutant.verdicts[mode]
    if mutant.verdicts[mode] is FaultKind.DEADLOCK:
        assert _passes("dense", ("eager",)), "the process is not clean"
