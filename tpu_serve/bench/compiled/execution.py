"""Running a schedule's scalar program against the modelled engines."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tpu_serve.bench.compiled.engines import Engines, signed
from tpu_serve.bench.compiled.machine import Core
from tpu_serve.bench.compiled.memory import WORD, Memory
from tpu_serve.bench.compiled.schedule import Instruction, Schedule, UnsupportedSchedule
from tpu_serve.bench.compiled.translate import Translator

_VALUE = re.compile(r"%\w+")
_BLOCK_LIMIT = 50_000_000


def _float(word: int) -> float:
    return float(np.uint32(word).view(np.float32))


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def _in_order(bundle: list[Instruction]) -> list[Instruction]:
    """The scalar instructions of a bundle so that what one defines and another reads comes first; phis before all.

    A name is defined in one place, so a use beside the definition means the new value.
    """
    scalar = [i for i in bundle if i.scalar]
    if len(scalar) < 2:
        return scalar
    definitions = {i.result: i for i in scalar if i.result is not None}
    ordered = [i for i in scalar if i.name in ("sphi", "pphi")]
    seen = {id(i) for i in ordered}

    def visit(instruction: Instruction) -> None:
        if id(instruction) in seen:
            return
        seen.add(id(instruction))
        read = [value for operand in instruction.operands for value in _VALUE.findall(operand)]
        for value in (*read, instruction.guard, instruction.otherwise):
            if value in definitions:
                visit(definitions[value])
        ordered.append(instruction)

    for instruction in scalar:
        visit(instruction)
    return ordered


class Execution:
    """One run of a kernel on device 0.

    Attributes after `run`:
      blocks: (first, past the last) bundle of each straight run of bundles; `counts`, `cycles` say how often each was entered and how
        long it took in all, waiting included.
      time: cycles from start to end.
      engines: DMAs and stalls.
      memory: what was assumed.
      halts: checks in the program that failed, and how often (a DMA out of bounds, a semaphore left nonzero), any of which would end it
        on the device.
      surplus: semaphores left nonzero because peers were taken to send more than they do; see `Engines`.
      scopes: calls and cycles of each traced scope, for programs compiled with trace marks.
    """

    def __init__(
        self, schedule: Schedule, core: Core, grid: tuple[int, ...], scalars: Mapping[int, Any], unknown: int = 0
    ) -> None:
        """Args:
        grid: chips along each axis of the slice.
        scalars, unknown: see `Memory`.
        """
        self.schedule = schedule
        self.core = core
        self._grid, self._scalars = grid, scalars
        self.memory = Memory(schedule, scalars, core.hbm_address_bytes, unknown)
        self._translator = Translator(schedule, self.memory)
        self.blocks: list[tuple[int, int]] = []
        self._source = self._translate()
        self.engines = Engines(core, grid, len(self.blocks))
        self.counts = [0] * len(self.blocks)
        self.cycles = [0.0] * len(self.blocks)
        self.time = 0.0
        self.halts: Counter[str] = Counter()
        self.surplus = 0
        self.quotients: deque[int] = deque()
        self.read_flags: deque[int] = deque()
        self.scopes: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._open: list[tuple[str, float]] = []

    def _translate(self) -> str:
        """Cuts the bundles into blocks and writes a function for each, which returns the number of the next one or -1."""
        bundles, delay = self.schedule.bundles, self.core.branch_delay
        branches = {a: i for a, bundle in enumerate(bundles) for i in bundle if i.target is not None}
        starts = {0, *(a + delay + 1 for a in branches), *(i.target for i in branches.values() if i.target is not None)}
        leaders = sorted(start for start in starts if start < len(bundles))
        for address in branches:
            if any(address < start <= address + delay for start in leaders) or any(
                address < other <= address + delay for other in branches
            ):
                raise UnsupportedSchedule(f"control flow meets in the delay slots of the branch at {address:#x}")
        self.blocks = list(zip(leaders, [*leaders[1:], len(bundles)], strict=True))
        number = {start: k for k, start in enumerate(leaders)}
        lines = ["def make(R,S,E,W,sg,fl,bits):", " F=[]"]
        for k, (start, end) in enumerate(self.blocks):
            lines += [f" def block{k}():", "  t=E.time"]
            target: int | None = None
            for address in range(start, end):
                for i in _in_order(bundles[address]):
                    if i.target is None:
                        lines += [f"  {line}" for line in self._translator.statements(i, address - start)]
                        continue
                    target = number.get(i.target, -1)
                    taken = f"R[{self._translator.number(i.guard)}]" if i.guard else "True"
                    lines.append(f"  go={'not ' if i.negated else ''}{taken}")
            lines.append(f"  E.time=t+{end - start}")
            following = k + 1 if end < len(bundles) else -1
            lines.append(f"  return {following}" if target is None else f"  return {target} if go else {following}")
            lines.append(f" F.append(block{k})")
        return "\n".join([*lines, " return F"])

    def run(self, limit: int | None = None) -> None:
        """Runs the program to its end.

        Args:
          limit: blocks it may enter, by default many.

        Raises:
          UnsupportedSchedule: it does not end.
        """
        limit = _BLOCK_LIMIT if limit is None else limit
        names: dict[str, Any] = {}
        exec(compile(self._source, "<schedule>", "exec"), names)
        values: list[Any] = [0] * self._translator.num_values
        functions: list[Callable[[], int]] = names["make"](
            values, self.memory.smem, self, self.engines.wait, signed, _float, _bits
        )  # fmt: skip
        counts, cycles, engines = self.counts, self.cycles, self.engines
        block, steps = 0, 0
        while block >= 0:
            before = self.time
            engines.block = block
            following = functions[block]()
            counts[block] += 1
            cycles[block] += self.time - before
            block = following
            steps += 1
            if steps > limit:
                raise UnsupportedSchedule(f"no end after {limit} blocks: a loop waits for what is not modelled")

    def depends_on_unknown(self) -> bool:
        """Whether a finished run would have gone another way had all that is not known been 1 instead: other blocks, or other DMAs.

        Where it would not, as when the unknown words are only addresses and data, the time is as good as if they had been given.
        """
        if not self.memory.assumptions:
            return False
        other = Execution(self.schedule, self.core, self._grid, self._scalars, unknown=1)
        try:
            other.run(limit=sum(self.counts))
        except UnsupportedSchedule:
            return True
        return (self.counts, self.engines.dma_counts, self.engines.dma_bytes) != (
            other.counts,
            other.engines.dma_counts,
            other.engines.dma_bytes,
        )

    def divide(self, a: int, b: int, note: str, is_signed: bool) -> None:
        """Queues the quotient, the remainder or, as the note says, one after the other. Division by zero, whose result nobody uses,
        gives zero."""
        if is_signed:
            a, b = signed(a), signed(b)
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
        remainder = a - quotient * b if b else 0
        results = {"kRem": [remainder], "kDivAndRem": [quotient, remainder]}.get(note, [quotient])
        self.quotients.extend(result & WORD for result in results)

    def halt(self, now: float, note: str) -> None:
        """Notes a check that failed."""
        if note.startswith("Semaphore") and self.engines.has_surplus(now):
            self.surplus += 1
        else:
            self.halts[note] += 1

    def mark(self, now: float, note: str) -> None:
        """Opens or closes a traced scope."""
        name = note[note.index("(") + 1 : -1]
        if note.startswith("TraceMeStart"):
            self._open.append((name, now))
            return
        for position in reversed(range(len(self._open))):
            if self._open[position][0] == name:
                _, start = self._open.pop(position)
                self.scopes[name][0] += 1
                self.scopes[name][1] += now - start
                return
