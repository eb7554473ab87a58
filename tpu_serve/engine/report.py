"""What a design takes, in numbers: weights by kind and one by one, caches, plans of experts. Nothing is read or allocated for it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.kv_cache import PagedCache
from tpu_serve.device.mesh import DEFAULT_RULES
from tpu_serve.device.params import ParamSpec, iterate, num_bytes_per_device
from tpu_serve.engine.design import Design
from tpu_serve.engine.limits import check_limits
from tpu_serve.engine.memory import Demand
from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import EnginePlan, demand_of
from tpu_serve.engine.sizing import first_plan, settled
from tpu_serve.moe_plan.plan import MoEPlan
from tpu_serve.scheduler.scheduler import num_slots

OTHERS = "norms, routers and others"
KINDS = {
    "embedding and head": re.compile(r"embedding|lm_head"),
    "experts": re.compile(r".*\.experts\..*"),
    "attention": re.compile(r".*\.(attention\..*|sinks)"),
    "recurrent layers": re.compile(r".*\.delta_net\..*"),
    "shared experts and dense MLP": re.compile(r".*\.(mlp\..*|shared_expert(\..*|_gate))"),
}
"""Kinds of weights, with the paths that belong to each; `OTHERS` are the rest."""


def kind_of(path: str) -> str:
    """The kind of weight at a dotted path."""
    return next((kind for kind, pattern in KINDS.items() if pattern.fullmatch(path)), OTHERS)


@dataclass(frozen=True, slots=True)
class WeightLine:
    """Weights that are alike but for their layer.

    Attributes:
      path: with `*` for the layer.
      count: how many there are.
      shape: over all devices, with padding.
      unpadded: what the model has of it.
      repeats: how often what is repeated along one of its axes is there.
      dtype: of the values.
      format: of a quantised weight, whose scales are float32; None for a plain array.
      split: logical axes that are split over the devices.
      whole: logical axes that would be, if the devices divided them.
      bytes_on_device: of all of them, on each device.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    unpadded: tuple[int, ...]
    repeats: int
    dtype: str
    format: str | None
    split: tuple[str, ...]
    whole: tuple[str, ...]
    bytes_on_device: int

    @property
    def kind(self) -> str:
        return kind_of(self.path)


def weight_lines(placement: Placement) -> list[WeightLine]:
    """A line for each distinct weight, in the order of the model."""
    lines: dict[tuple[Any, ...], WeightLine] = {}
    for path, spec in iterate(placement.specs):
        line = _line(path, spec, placement)
        key = (line.path, line.shape, line.unpadded, line.dtype, line.format, line.split)
        seen = lines.get(key)
        if seen is not None:
            line = dataclasses.replace(
                line, count=seen.count + 1, bytes_on_device=seen.bytes_on_device + line.bytes_on_device
            )
        lines[key] = line
    return list(lines.values())


def _line(path: str, spec: ParamSpec, placement: Placement) -> WeightLine:
    axes = [axis for axis in spec.axes if axis is not None and axis in DEFAULT_RULES]
    values = spec.arrays[0]
    return WeightLine(
        path=re.sub(r"(?<=\.)\d+(?=\.)", "*", path),
        count=1,
        shape=spec.shape,
        unpadded=spec.given,
        repeats=1 if spec.repeat is None else spec.repeat.times,
        dtype=np.dtype(values.dtype).name,
        format=None if spec.format is None else spec.format.name,
        split=tuple(axis for axis in axes if axis in placement.rules),
        whole=tuple(axis for axis in axes if axis not in placement.rules),
        bytes_on_device=num_bytes_per_device({path: spec}, placement.mesh, placement.rules),
    )


def bytes_by_kind(lines: Sequence[WeightLine]) -> dict[str, int]:
    """Bytes on each device by kind of weight, kinds without any left out."""
    found = {kind: sum(line.bytes_on_device for line in lines if line.kind == kind) for kind in (*KINDS, OTHERS)}
    return {kind: size for kind, size in found.items() if size}


def num_active_params(design: Design) -> int:
    """Parameters that one token meets: of experts only those that it is sent to."""
    moe, total = design.model.moe, 0
    for path, spec in iterate(design.placement.specs):
        count = math.prod(spec.given)
        if moe is not None and kind_of(path) == "experts":
            count = count * moe.top_k // moe.num_experts
        total += count
    return total


@dataclass(frozen=True, slots=True)
class CacheLine:
    """Attention layers that see equally far.

    Attributes:
      window: tokens that they see; None for all.
      num_layers: how many there are.
      token_bytes: of a token over all of them, wherever these lie.
      token_bytes_on_device: what each device holds of that.
      sequence_pages: that the longest sequence holds while it is decoded.
      sequence_bytes_on_device: of those.
      num_pages: on each device, the one for padding included; None where the memory does not suffice.
    """

    window: int | None
    num_layers: int
    token_bytes: int
    token_bytes_on_device: int
    sequence_pages: int
    sequence_bytes_on_device: int
    num_pages: int | None


def cache_lines(placement: Placement, demand: Demand, plan: EnginePlan | None) -> Iterator[CacheLine]:
    """A line for each window, that without first."""
    everywhere, here = placement.cache_layout, placement.cache_on_one_device
    for at, window in enumerate(everywhere.windows):
        pages = demand.one_sequence(window, decoding=True)
        yield CacheLine(
            window=window,
            num_layers=sum(isinstance(one, PagedCache) and one.window == window for one in everywhere.layers),
            token_bytes=everywhere.page_bytes(demand.page_size, window) // demand.page_size,
            token_bytes_on_device=here.page_bytes(demand.page_size, window) // demand.page_size,
            sequence_pages=pages,
            sequence_bytes_on_device=pages * here.page_bytes(demand.page_size, window),
            num_pages=None if plan is None else plan.num_pages[at],
        )


@dataclass(frozen=True, slots=True)
class StateLine:
    """Recurrent layers.

    Attributes:
      num_layers: how many there are.
      sequence_bytes: of a sequence over all of them, wherever these lie.
      sequence_bytes_on_device: what each device holds of that.
      num_slots: rows for sequences.
      num_snapshots: rows for the prefix cache; None where the memory does not suffice.
    """

    num_layers: int
    sequence_bytes: int
    sequence_bytes_on_device: int
    num_slots: int
    num_snapshots: int | None


def state_line(placement: Placement, demand: Demand, plan: EnginePlan | None) -> StateLine | None:
    """None for a model without recurrent layers."""
    everywhere = placement.cache_layout
    if not everywhere.has_state:
        return None
    return StateLine(
        num_layers=sum(not isinstance(one, PagedCache) for one in everywhere.layers),
        sequence_bytes=everywhere.state_bytes,
        sequence_bytes_on_device=placement.cache_on_one_device.state_bytes,
        num_slots=num_slots(demand.max_num_seqs),
        num_snapshots=None if plan is None else plan.num_snapshots,
    )


@dataclass(frozen=True, slots=True)
class ExpertsLine:
    """Token buckets whose experts run alike.

    Attributes:
      num_tokens: the buckets.
      way: path and mode, as in "fused D".
      tiles: of the kernel; empty on other paths.
      origin: where these come from.
      reason: why this path.
    """

    num_tokens: tuple[int, ...]
    way: str
    tiles: str
    origin: str
    reason: str


def experts_lines(plans: Sequence[MoEPlan]) -> list[ExpertsLine]:
    """A line for every distinct answer."""
    alike: dict[tuple[str, str, str, str], list[int]] = {}
    for plan in plans:
        alike.setdefault((plan.way, plan.tiles, plan.origin, plan.reason), []).append(plan.num_tokens)
    return [ExpertsLine(tuple(num_tokens), *answer) for answer, num_tokens in alike.items()]


@dataclass(frozen=True, slots=True)
class Report:
    """What a model takes on devices, and whether it fits.

    Attributes:
      plan: sizes; None where it does not fit.
      demand: what caches are for; None where options contradict each other.
      problem: why it does not fit; empty where it does.
    """

    design: Design
    plan: EnginePlan | None
    demand: Demand | None
    problem: str

    @classmethod
    def of(cls, config: EngineConfig, design: Design, largest: Callable[[EnginePlan], Any] | None = None) -> Report:
        """Makes all plans that a server makes at its start.

        Args:
          largest: compiles the largest step of a plan; without it all figures are calculated.

        Raises:
          ConfigError: experts cannot run as the options ask.
        """
        demand, plan, problem = None, None, ""
        try:
            demand = demand_of(config, design.model.max_position, design.placement.chip)
            plan = design.plan(config) if largest is None else first_plan(config, design)
            demand = plan.demand  # of --max-model-len auto only the plan knows
        except ConfigError as error:
            problem = str(error)
        if plan is not None and design.experts is not None:
            design.experts.planner.prepare(plan.expert_tokens, is_strict=config.moe.moe_strict_tables)
        if plan is not None:
            try:
                check_limits(config, design, plan)
                if largest is not None:
                    plan = settled(config, design, plan, largest)
                    demand = plan.demand
            except ConfigError as error:
                plan, problem = None, str(error)
        return cls(design, plan, demand, problem)

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def weights(self) -> list[WeightLine]:
        return weight_lines(self.design.placement)

    @property
    def caches(self) -> list[CacheLine]:
        """None of them where the demand is not known."""
        return [] if self.demand is None else list(cache_lines(self.design.placement, self.demand, self.plan))

    @property
    def state(self) -> StateLine | None:
        """None, too, where the demand is not known."""
        return None if self.demand is None else state_line(self.design.placement, self.demand, self.plan)

    @property
    def experts(self) -> list[ExpertsLine]:
        """None of them for a dense model, or where nothing fits."""
        return [] if self.design.experts is None else experts_lines(self.design.experts.planner.plans)

    @property
    def concurrency(self) -> float | None:
        """How many of the longest sequences can be decoded at a time."""
        return None if self.plan is None else self.plan.concurrency(self.design.placement.cache_layout.windows)

    @property
    def cache_bytes(self) -> int | None:
        """Pages and recurrent state on each device."""
        return None if self.plan is None else self.plan.cache_bytes
