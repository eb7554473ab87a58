"""The program of a cell: the step that a server would run, made from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.fused_moe import scalars_of
from tpu_serve.bench.models.cells import STEPS
from tpu_serve.bench.models.operands import attention_scalars
from tpu_serve.bench.models.published import folder
from tpu_serve.bench.models.step import Step
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import Chip, chip_of
from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.design import Design, design_engine
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.engine.programs import make_programs
from tpu_serve.hf_config import read_config
from tpu_serve.moe_plan.plan import MoEPlan
from tpu_serve.runner.programs import Allowed, Programs

MAX_MODEL_LEN = 16384
"""Longest sequence: page tables are that wide."""
MAX_NUM_SEQS = 256
BUCKETS = sorted({step.num_tokens for step in STEPS.values()})


def options(model: str, num_devices: int, layers: Sequence[str], overrides: Mapping[str, Any]) -> EngineConfig:
    """Those of a server, with the model cut to some layers."""
    kinds = {"layer_types": list(layers)} if len(set(layers)) > 1 else {}
    return EngineConfig.from_options(
        model=str(folder(model)),
        load_format="dummy",
        tensor_parallel_size=num_devices,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        token_buckets=BUCKETS,
        hf_overrides={"num_hidden_layers": len(layers), **kinds, **overrides},
    )


@dataclass(frozen=True)
class Target:
    """A step of a model on devices.

    Attributes:
      whole: the design of all layers, whose plan `plan` is.
      cut: that of those which are compiled, with as many pages and slots as the whole model has.
      moe: how the experts run in this step.
    """

    whole: Design
    cut: Design
    plan: EnginePlan
    moe: MoEPlan | None
    programs: Programs
    step: Step

    @property
    def chip(self) -> Chip:
        return self.cut.placement.chip

    @property
    def windows(self) -> list[int | None]:
        """Of the attention layers that are compiled, one after the other."""
        return [one.window for one in self.cut.placement.cache_layout.layers if isinstance(one, PagedCache)]

    @property
    def scalars(self) -> dict[str, dict[int, Any]]:
        """What kernels are given that decides about their way, by patterns of their names: uniform routing."""
        layout = self.programs.layouts[self.step.num_tokens]
        found = attention_scalars(self.step, layout, min(self.plan.num_pages))
        if self.moe is not None and self.moe.config is not None:
            found |= scalars_of(self.moe.problem, self.moe.config, self.chip)
        return found


def make(
    devices: Sequence[Any],
    model: str,
    step: Step,
    layers: Sequence[str],
    all_layers: Sequence[str],
    overrides: Mapping[str, Any],
) -> Target:
    """The program, not yet traced.

    Raises:
      ConfigError: the model cannot run so; the message is the reason.
    """
    chip, mesh = chip_of(devices[0]), make_mesh(devices)
    config = options(model, len(devices), all_layers, overrides)
    whole = design_engine(config, read_config(folder(model), config.model.hf_overrides), chip, mesh)
    plan = whole.plan(config)
    if tuple(layers) != tuple(all_layers):
        config = options(model, len(devices), layers, overrides)
        cut = design_engine(config, read_config(folder(model), config.model.hf_overrides), chip, mesh)
    else:
        cut = whole
    moe = None if cut.experts is None else cut.experts.planner.plan(step.num_tokens)
    programs = make_programs(config, cut, plan, Allowed(cut.model.vocab_size))
    return Target(whole, cut, plan, moe, programs, step)
