"""The program of a cell: the step that a server would run, made from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.fused_moe import scalars_of
from tpu_serve.bench.models.cells import STEPS, all_layers
from tpu_serve.bench.models.operands import attention_scalars, recurrence_scalars
from tpu_serve.bench.models.published import folder
from tpu_serve.bench.models.step import Step
from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import Chip, chip_of
from tpu_serve.device.kv_cache import PagedCache, StateCache
from tpu_serve.device.mesh import make_mesh
from tpu_serve.engine.design import Design, design_engine
from tpu_serve.engine.plan import EnginePlan
from tpu_serve.engine.programs import make_programs
from tpu_serve.hf_config import read_config
from tpu_serve.kernels.gated_delta_rule.problem import Problem
from tpu_serve.moe_plan.plan import MoEPlan
from tpu_serve.runner.programs import Allowed, Programs

MAX_MODEL_LEN = 16384
"""Longest sequence: page tables are that wide."""
MAX_NUM_SEQS = 256
BUCKETS = sorted({step.num_tokens for step in STEPS.values()})


def options(model: str, num_devices: int, layers: Sequence[str]) -> EngineConfig:
    """Those of a server, with the model cut to the layers of these kinds."""
    kinds = {"layer_types": list(layers)} if len(set(all_layers(model))) > 1 else {}
    return EngineConfig.from_options(
        model=str(folder(model)),
        load_format="dummy",
        tensor_parallel_size=num_devices,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        token_buckets=BUCKETS,
        hf_overrides={"num_hidden_layers": len(layers), **kinds},
    )


@dataclass(frozen=True)
class Target:
    """A step of a model on devices.

    Attributes:
      moe: how the experts run in this step.
    """

    design: Design
    plan: EnginePlan
    moe: MoEPlan | None
    programs: Programs
    step: Step

    @property
    def chip(self) -> Chip:
        return self.design.placement.chip

    @property
    def windows(self) -> list[int | None]:
        """Of the attention layers, one after the other."""
        return [one.window for one in self.design.placement.cache_layout.layers if isinstance(one, PagedCache)]

    @property
    def scalars(self) -> dict[str, dict[int, Any]]:
        """What kernels are given that decides about their way, by patterns of their names: uniform routing."""
        layout = self.programs.layouts[self.step.num_tokens]
        found = attention_scalars(self.step, layout, min(self.plan.num_pages))
        if self.moe is not None and self.moe.config is not None:
            found |= scalars_of(self.moe.problem, self.moe.config, self.chip)
        if (recurrence := self._recurrence(layout.num_rows)) is not None:
            found |= recurrence_scalars(self.step, recurrence)
        return found

    def _recurrence(self, num_rows: int) -> Problem | None:
        """What the recurrent layers of a device are asked; None without such layers."""
        design = self.design
        states = [one for one in design.placement.cache_on_one_device.layers if isinstance(one, StateCache)]
        if not states:
            return None
        heads, key_dim, value_dim = dict(states[0].arrays)["state"].shape
        group = design.hf_config.positive("linear_num_value_heads") // design.hf_config.positive("linear_num_key_heads")
        return Problem(self.step.num_tokens, num_rows, heads // group, heads, key_dim, value_dim)


def make(
    devices: Sequence[Any], model: str, step: Step, layers: Sequence[str] | None = None, chip: Chip | None = None
) -> Target:
    """The program, not yet traced.

    Args:
      layers: kinds of those that the model is cut to; None for all that it has.
      chip: what is planned for; None for that of the devices.

    Raises:
      ConfigError: the model cannot run so; the message is the reason.
    """
    chip, mesh = chip or chip_of(devices[0]), make_mesh(devices)
    config = options(model, len(devices), layers or all_layers(model))
    design = design_engine(config, read_config(folder(model), config.model.hf_overrides), chip, mesh)
    plan = design.plan(config)
    moe = None if design.experts is None else design.experts.planner.plan(step.num_tokens)
    return Target(design, plan, moe, make_programs(config, design, plan, Allowed(design.model.vocab_size)), step)
