"""A scheduled program walked in its order: what the core runs, what goes on beside it, and when it must wait for that.

The core runs one instruction after the other, each as long as its simulated schedule. Asynchronous copies share the memory's rate with the
kernels' own traffic: they get what these leave, one copy after the other, and the core waits where a result is not there yet. A collective
takes as long as its bytes on the links, by the shorter of two ways, and as its schedule. Launches of kernels take no time here.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.bench.compiled.collectives import Instruction as Collective
from tpu_serve.bench.compiled.compiler import array_bytes
from tpu_serve.bench.compiled.machine import HBM_EFFICIENCY, LINK_LATENCY_SECONDS, Core
from tpu_serve.bench.models.hlo import Instruction, Module
from tpu_serve.bench.models.parts import REST, parts_of
from tpu_serve.bench.models.step import Step
from tpu_serve.device.chip import Chip
from tpu_serve.kernels.fused_moe_v2.bound import fewest_links

SIMULATED, CALCULATED = "simulated", "calculated"
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "after-all", "opt-barrier", "domain",
    "replica-id", "add-dependency",
)  # fmt: skip
_SMALL_BYTES = 4096
"""What makes no more than this and has no schedule of its own is scalar work of the calling program."""


@dataclass
class Walk:
    """What a walk found, for one device.

    Attributes:
      us: microseconds from start to end.
      by_part: of them, by part of the model.
      by_origin: of them, "simulated" and "calculated".
      waiting_us: of them, spent waiting for copies and asynchronous collectives.
      hbm_bytes: read and written by kernels and by copies.
      ici_bytes: that leave the chip, a device's share of them: of kernels; collective_bytes: of collectives.
      kernels: by name (part, runs, microseconds in all).
      collectives: by (part, operation): how many run, and the bytes of their results.
      unread: instructions of which nothing is known.
      unknown: kernels whose schedule depends on operands that are not known, so that their times are those of some other call.
      loops: loops whose turns are not known, counted as one turn.
    """

    us: float = 0.0
    by_part: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_origin: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waiting_us: float = 0.0
    hbm_bytes: float = 0.0
    ici_bytes: float = 0.0
    collective_bytes: float = 0.0
    kernels: dict[str, tuple[str, float, float]] = field(default_factory=dict)
    collectives: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    loops: set[str] = field(default_factory=set)


class Timeline:
    """Walks a module.

    Args:
      kernels: findings by name, see `bench.compiled.worker.read_dump`.
      collectives: of the module, by name.
      windows: of the model's attention layers, one after the other.
    """

    def __init__(
        self,
        module: Module,
        kernels: Mapping[str, Mapping[str, Any]],
        collectives: Sequence[Collective],
        step: Step,
        windows: Sequence[int | None],
        core: Core,
        grid: tuple[int, ...],
    ) -> None:
        self._module, self._kernels, self._step = module, dict(kernels), step
        # Of instructions that are the same the compiler makes and dumps one.
        likeness = module.likeness()
        made = {likeness[name]: facts for name, facts in kernels.items() if name in likeness and "error" not in facts}
        for name, like in likeness.items():
            if name not in kernels and like in made:
                self._kernels[name] = made[like]
        self._collectives = {one.name: one for one in collectives}
        self._windows, self._num_attended = windows, 0
        self._window: int | None = None
        self._core, self._grid = core, grid
        self._rate = core.chip.hbm_bytes_per_second * HBM_EFFICIENCY / 1e6  # bytes a microsecond
        self._backlog: list[tuple[str, float]] = []  # asynchronous copies under way, and what is left of them
        self._links_free = 0.0
        self._ready: dict[str, float] = {}  # when an asynchronous collective ends
        self.walk = Walk()

    def run(self) -> Walk:
        self._computation(self._module.entry, 1.0, REST)
        return self.walk

    def _computation(self, name: str, times: float, around: str) -> None:
        """Runs a computation `times` over, as if all its instructions took so much longer."""
        if not times:
            return
        parts = parts_of(self._module, name, around)
        for one in self._module.computations[name]:
            if one.operation not in _FREE:
                self._instruction(one, times, parts[one.name])

    def _instruction(self, one: Instruction, times: float, part: str) -> None:
        frames = self._module.frames.get(one.frame or 0, ())
        function = frames[0][1] if frames else ""
        if one.operation == "while":
            self._loop(one, function, times, part)
        elif one.operation == "conditional":
            branches = one.called.get("branches", ())
            self._computation(branches[min(self._step.branch(function), len(branches) - 1)], times, part)
        elif one.operation.endswith("-done"):
            self._wait(one.operands[0] if one.operands else "", part)
        elif one.operation.endswith("-start"):
            self._start(one, times, part)
        elif one.operation == "call":
            self._computation(one.called["to_apply"][0], times, part)
        elif found := self._collective_in(one):
            self._sent(found, times, part)
            self._busy(self._link_us(found) * times, 0.0, part, CALCULATED)
        else:
            self._kernel(one, times, part)

    def _loop(self, one: Instruction, function: str, times: float, part: str) -> None:
        if function == "paged_attention":
            self._window = self._windows[min(self._num_attended, len(self._windows) - 1)]
            self._num_attended += 1
        turns = one.num_trips if one.num_trips is not None else self._step.turns(function, self._window)
        if turns is None:
            self.walk.loops.add(one.name)
            turns = 1
        self._computation(one.called["body"][0], times * turns, part)

    def _kernel(self, one: Instruction, times: float, part: str) -> None:
        facts = self._kernels.get(one.name)
        if facts is None or "error" in facts:
            size = array_bytes(one.shape)
            if size > _SMALL_BYTES and one.operation not in ("custom-call", "reshape"):
                self.walk.unread.add(one.name)
                self._busy(2 * size / self._rate * times, 2 * size * times, part, CALCULATED)
            return
        if facts.get("depends_on_unknown"):
            self.walk.unknown.add(one.name)
        self._ran(one.name, facts, times, part)
        self._busy(facts["us"] * times, facts["hbm_bytes"] * times, part, SIMULATED)

    def _ran(self, name: str, facts: Mapping[str, Any], times: float, part: str) -> None:
        _, runs, us = self.walk.kernels.get(name, (part, 0.0, 0.0))
        self.walk.kernels[name] = part, runs + times, us + facts["us"] * times
        self.walk.ici_bytes += facts.get("ici_bytes", 0) * times

    def _busy(self, us: float, hbm_bytes: float, part: str, origin: str) -> None:
        """The core is busy, and copies go on with what it leaves of the memory's rate."""
        walk = self.walk
        walk.us += us
        walk.by_part[part] += us
        walk.by_origin[origin] += us
        walk.hbm_bytes += hbm_bytes
        left = max(0.0, us * self._rate - hbm_bytes)
        while self._backlog and left > 0:
            name, size = self._backlog[0]
            if size > left:
                self._backlog[0] = name, size - left
                break
            left -= size
            self._backlog.pop(0)

    def _start(self, one: Instruction, times: float, part: str) -> None:
        found = self._collective_in(one)
        if found is not None:
            self._sent(found, times, part)
            self._links_free = max(self._links_free, self.walk.us) + self._link_us(found) * times
            self._ready[one.name] = self._links_free
            return
        size = _moved_bytes(one) * times
        self.walk.hbm_bytes += size
        self._backlog.append((one.name, size))

    def _wait(self, start: str, part: str) -> None:
        """Until what `start` began is there, and what was begun before it on the same way."""
        us = max(0.0, self._ready.pop(start, 0.0) - self.walk.us)
        names = [name for name, _ in self._backlog]
        if start in names:
            us += sum(size for _, size in self._backlog[: names.index(start) + 1]) / self._rate
        self.walk.waiting_us += us
        self._busy(us, 0.0, part, CALCULATED)

    def _collective_in(self, one: Instruction) -> Collective | None:
        """The collective that an instruction is, or that the computations hold which it calls."""
        if one.name in self._collectives:
            return self._collectives[one.name]
        for role in ("calls", "to_apply"):
            for name in one.called.get(role, ()) if one.operation not in ("reduce", "sort", "scatter") else ():
                for inner in self._module.computations.get(name, ()):
                    if inner.name in self._collectives:
                        return self._collectives[inner.name]
        return None

    def _sent(self, found: Collective, times: float, part: str) -> None:
        count, size = self.walk.collectives.get((part, found.operation), (0.0, 0.0))
        self.walk.collectives[part, found.operation] = count + times, size + found.num_bytes * times
        self.walk.collective_bytes += sent_bytes(found, self._core.chip) * times

    def _link_us(self, found: Collective) -> float:
        """How long a collective takes: directly from each device to each, or from chip to chip, whichever is shorter."""
        facts = self._kernels.get(found.name, {})
        return max(facts.get("us", 0.0), link_seconds(found, self._core, self._grid) * 1e6)


def sent_bytes(found: Collective, chip: Chip) -> float:
    """What leaves a chip at least, a device's share of it: devices of a chip add up before they send, and pass on what they receive."""
    each = chip.devices_per_chip
    chips = max(1, found.num_devices // each)
    share = (chips - 1) / chips
    if found.operation == "collective-permute":
        return found.num_bytes
    if found.operation.endswith("all-to-all"):
        return found.num_bytes * share
    phases = {"all-reduce": 2, "reduce-scatter": found.num_devices}
    return found.num_bytes * share * phases.get(found.operation, 1) / each


def link_seconds(found: Collective, core: Core, grid: tuple[int, ...]) -> float:
    """Of a collective over all devices of a slice, calculated.

    Two phases for an all-reduce and one for the others, each with one latency. Directly, a device sends every other one its share, at the rate
    of `Core.link_bytes_per_cycle`; from chip to chip, every chip receives once what it has not, over as many links as the chip with the fewest
    has.
    """
    devices = max(2, found.num_devices)
    phases = 2 if found.operation == "all-reduce" else 1
    whole = found.num_bytes * (devices if found.operation == "reduce-scatter" else 1)
    if found.operation == "collective-permute":
        return whole / core.chip.link_bytes_per_second + LINK_LATENCY_SECONDS
    direct = (devices - 1) / devices * whole / (core.link_bytes_per_cycle(grid) * core.clock_hz)
    if found.operation == "all-to-all":
        return direct + LINK_LATENCY_SECONDS
    chips, links = math.prod(grid), fewest_links(grid) * core.mesh_links
    relayed = (chips - 1) / chips * whole / (links * core.chip.link_bytes_per_second) if links else direct
    return phases * (min(direct, relayed) + LINK_LATENCY_SECONDS)


_OPERAND = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[[\d,]*\](?:\{[^}]*\})?")


def _moved_bytes(one: Instruction) -> float:
    """What an asynchronous instruction reads and writes in HBM: both ends of a copy, all arrays of a call."""
    arrays = [array for array in _OPERAND.findall(one.shape) if "S(2)" not in array and "S(8)" not in array]
    in_hbm = [array for array in arrays if "S(" not in array]
    if one.operation.endswith(("copy-start", "slice-start")):
        # The result and the operand, of which a slice reads only what it gives.
        ends = [arrays[0], arrays[-1]] if len(arrays) > 1 else arrays
        return sum(end in in_hbm for end in ends) * min(map(array_bytes, ends)) if ends else 0.0
    return sum(map(array_bytes, in_hbm))
