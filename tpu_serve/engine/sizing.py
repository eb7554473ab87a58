"""Sizes of an engine from first to last: calculated, then by the compiler's figures of the largest step, then checked with those of all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.engine.compiled_memory import Budget, ProgramBytes, settle, verify
from tpu_serve.engine.design import Design
from tpu_serve.engine.memory import StepBytes, usable_bytes
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.runner.compilation import Compilation

logger = logging.getLogger(__name__)


def budget_of(config: EngineConfig, design: Design, plan: EnginePlan) -> Budget:
    """What a device has for a plan."""
    return Budget(usable_bytes(config, design.placement.chip), design.param_bytes, plan.sampler_bytes)


def first_plan(config: EngineConfig, design: Design) -> EnginePlan:
    """Calculated sizes. On a TPU, where the compiler has the last word before weights are read, what only fits if steps take nothing is let pass.

    Raises:
      ConfigError: see `make_plan`.
    """
    try:
        return design.plan(config)
    except ConfigError as refusal:
        if not design.placement.chip.is_tpu:
            raise
        plan = design.plan(config, lambda demand, buckets: StepBytes())
        logger.info("By calculated figures it does not fit, the compiler is asked: %s", refusal)
        return plan


def settled(config: EngineConfig, design: Design, plan: EnginePlan, largest: Callable[[EnginePlan], Any]) -> EnginePlan:
    """Sizes by the compiler's figures on a TPU; elsewhere the plan as it is, for caches there do not take all that is left.

    Args:
      largest: compiles the largest step of a plan, a `jax.stages.Compiled`.

    Raises:
      ConfigError: see `compiled_memory.settle`.
    """
    if not design.placement.chip.is_tpu:
        return plan
    calculated = design.step_bytes(config)(plan.demand, plan.buckets)
    of_largest = design.step_formula.code_bytes(plan.buckets[-1])
    return settle(
        plan,
        budget_of(config, design, plan),
        calculated,
        lambda plan: _bytes_of(plan, largest),
        lambda step: design.plan(config, lambda demand, buckets: step),
        lambda code_bytes: code_bytes * calculated.code_bytes // of_largest or calculated.code_bytes,
    )


def _bytes_of(plan: EnginePlan, largest: Callable[[EnginePlan], Any]) -> ProgramBytes | None:
    """See `settled`; also of what the compiler refuses because it does not fit.

    Raises:
      ConfigError: the compiler refuses it for another reason.
    """
    try:
        return ProgramBytes.of(largest(plan))
    except jax.errors.JaxRuntimeError as error:
        told = ProgramBytes.of_refusal(error)
        if told is None:
            first_line = str(error).strip().splitlines()[0]
            raise ConfigError(f"The compiler refuses the step of {plan.buckets[-1]} tokens: {first_line}") from error
        return told


def verified(config: EngineConfig, design: Design, plan: EnginePlan, compilation: Compilation) -> EnginePlan:
    """The plan with the figures of its programs if all of them are there, and a line in the log that says what memory is used for.

    Raises:
      ConfigError: see `compiled_memory.verify`.
    """
    budget = budget_of(config, design, plan)
    known: dict[str, ProgramBytes] = {}
    for name in compilation.names:
        if compilation.is_done(name) and (told := ProgramBytes.of(compilation.made(name))) is not None:
            known[name] = told
    if len(known) == len(compilation.names):
        plan = verify(plan, budget, known)
    pages = "+".join(map(str, plan.num_pages))
    logger.info("Memory of each device in GiB, with %s pages: %s", pages, budget.text(plan))
    return plan
