"""What a run of a schedule tells: loops, phases, matrix-unit use, DMAs, stalls, modelled time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpu_serve.bench.compiled.execution import Execution
from tpu_serve.bench.compiled.machine import Core
from tpu_serve.bench.compiled.schedule import Instruction

_MATMUL_TYPE = re.compile(r"\.(bf16|f32|s8|u8|s4|u4|f8\w+|f4\w+)\b")


@dataclass(frozen=True, slots=True)
class Loop:
    """Bundles `start` to before `end`, blocks `first` to `last`, inside of `depth` other loops."""

    start: int
    end: int
    first: int
    last: int
    depth: int


def find_loops(execution: Execution) -> list[Loop]:
    """The loops of a program, outer before inner: every branch backwards makes one, from its target to the end of its delay slots."""
    starts = {start: k for k, (start, _) in enumerate(execution.blocks)}
    ends: dict[int, int] = {}
    for k, (start, end) in enumerate(execution.blocks):
        for bundle in execution.schedule.bundles[start:end]:
            for i in bundle:
                if i.target is not None and i.target <= start:
                    first = starts[i.target]
                    ends[first] = max(k, ends.get(first, k))
    spans = sorted(ends.items(), key=lambda span: (span[0], -span[1]))
    return [
        Loop(
            execution.blocks[first][0],
            execution.blocks[last][1],
            first,
            last,
            sum(a <= first and last <= b and (a, b) != (first, last) for a, b in spans),
        )
        for first, last in spans
    ]


def matmul_cycles(instruction: Instruction, core: Core) -> int:
    """How long an instruction keeps its matrix unit busy; 0 if it is no matrix multiplication."""
    if not instruction.name.startswith("vmatmul"):
        return 0
    kind = _MATMUL_TYPE.search(instruction.name)
    return core.matmul_cycles.get(kind.group(1) if kind else "", core.matmul_cycles[""])


class Findings:
    """Sums over the blocks of a finished `Execution`."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._core = execution.core
        self._static = [self._count(start, end) for start, end in execution.blocks]
        self.loops = find_loops(execution)

    def _count(self, start: int, end: int) -> Counter[str]:
        found: Counter[str] = Counter(bundles=end - start)
        for bundle in self._execution.schedule.bundles[start:end]:
            found["empty"] += not bundle
            for i in bundle:
                busy = matmul_cycles(i, self._core)
                found["matmul_cycles"] += busy
                found["matmuls"] += busy > 0
                if i.spill:
                    found["spills" if i.name.startswith("vst") else "fills"] += 1
        return found

    def microseconds(self, cycles: float) -> float:
        return round(cycles / self._core.clock_hz * 1e6, 3)

    def stretch(self, blocks: range) -> dict[str, Any]:
        """What happened in consecutive blocks.

        Returns:
          bundles (static), bundles_executed, cycles, us, share (of the whole), stall_dma_us, stall_peer_us, matmuls, spills and fills
          (vector registers written and read back, executed), hbm_bytes, peer_bytes (asked for there), mxu_busy (share of the matrix
          units' cycles in which they multiply, stalls included) and mxu_busy_in_schedule (without the stalls).
        """
        run, total = self._execution, Counter[str]()
        for k in blocks:
            for name, amount in self._static[k].items():
                total[name] += amount * run.counts[k]
        cycles = sum(run.cycles[k] for k in blocks)
        engines = run.engines
        capacity = total["matmul_cycles"] / self._core.matrix_units
        return {
            "bundles": sum(self._static[k]["bundles"] for k in blocks),
            "bundles_executed": total["bundles"],
            "cycles": round(cycles),
            "us": self.microseconds(cycles),
            "share": round(cycles / max(run.time, 1), 4),
            "stall_dma_us": self.microseconds(sum(engines.stall_dma[k] for k in blocks)),
            "stall_peer_us": self.microseconds(sum(engines.stall_peer[k] for k in blocks)),
            "matmuls": total["matmuls"],
            "spills": total["spills"],
            "fills": total["fills"],
            "hbm_bytes": sum(engines.hbm_bytes[k] for k in blocks),
            "peer_bytes": sum(engines.peer_bytes[k] for k in blocks),
            "mxu_busy": round(capacity / max(cycles, 1), 4),
            "mxu_busy_in_schedule": round(capacity / max(total["bundles"], 1), 4),
        }

    def loop(self, loop: Loop) -> dict[str, Any]:
        """A loop's `stretch`, inner loops included, its trips, and what a trip takes; `own_us` is without inner loops."""
        trips = self._execution.counts[loop.first]
        found = self.stretch(range(loop.first, loop.last + 1))
        return {
            "at": f"{loop.start:#x}-{loop.end:#x}",
            "depth": loop.depth,
            "trips": trips,
            "cycles_per_trip": round(found["cycles"] / max(trips, 1), 1),
            "own_us": self.microseconds(self._own_cycles(loop)),
            **found,
        }

    def _own_cycles(self, loop: Loop) -> float:
        inner = {
            k
            for other in self.loops
            if other != loop and loop.first <= other.first and other.last <= loop.last
            for k in range(other.first, other.last + 1)
        }
        return sum(self._execution.cycles[k] for k in range(loop.first, loop.last + 1) if k not in inner)

    def phases(self, small: float = 0.01) -> list[dict[str, Any]]:
        """The program cut at its outermost loops: what comes before, each loop, what comes between and after.

        Neighbours that take less than `small` of the time each are one phase of the kind "several".
        """
        cuts: list[tuple[str, range]] = []
        done = 0
        for loop in (loop for loop in self.loops if loop.depth == 0):
            cuts.append(("straight", range(done, loop.first)))
            cuts.append(("loop", range(loop.first, loop.last + 1)))
            done = loop.last + 1
        cuts.append(("straight", range(done, len(self._execution.blocks))))
        limit = small * self._execution.time
        joined: list[tuple[str, range, bool]] = []
        for kind, blocks in cuts:
            if not blocks:
                continue
            is_small = sum(self._execution.cycles[k] for k in blocks) < limit
            if is_small and joined and joined[-1][2]:
                joined[-1] = ("several", range(joined[-1][1].start, blocks.stop), True)
            else:
                joined.append((kind, blocks, is_small))
        return [
            {"at": f"{self._execution.blocks[blocks[0]][0]:#x}", "kind": kind, **self.stretch(blocks)}
            for kind, blocks, _ in joined
            if any(self._execution.counts[k] for k in blocks)
        ]

    def summary(self, num_loops: int = 8) -> dict[str, Any]:
        """Everything about the kernel, ready for JSON.

        Returns:
          the whole program's `stretch`, and: dma (count and bytes by kind), hbm_dmas, ici_bytes and ici_dmas (to other chips),
          sibling_bytes and sibling_dmas (to the other device of the chip), remote_signals, unanswered_waits, peer_surplus, failed_checks, assumed
          (see `Engines`, `Execution`, `Memory`), hottest_loop (the one with the largest `own_us`), loops (the `num_loops` largest),
          phases, and scopes where traced.
        """
        run, engines = self._execution, self._execution.engines
        loops = sorted((loop for loop in self.loops if run.counts[loop.first]), key=self._own_cycles, reverse=True)

        def dmas(prefix: str) -> tuple[int, int]:
            kinds = [kind for kind in engines.dma_counts if kind.startswith(prefix)]
            return sum(engines.dma_bytes[kind] for kind in kinds), sum(engines.dma_counts[kind] for kind in kinds)

        ici_bytes, ici_dmas = dmas("remote ")
        sibling_bytes, sibling_dmas = dmas("sibling ")
        scopes: Mapping[str, list[float]] = run.scopes
        return {
            **self.stretch(range(len(run.blocks))),
            "dma": {
                kind: {"count": count, "bytes": engines.dma_bytes[kind]}
                for kind, count in sorted(engines.dma_counts.items())
            },
            "hbm_dmas": sum(n for kind, n in engines.dma_counts.items() if "hbm" in kind and " " not in kind),
            "ici_bytes": ici_bytes,
            "ici_dmas": ici_dmas,
            "sibling_bytes": sibling_bytes,
            "sibling_dmas": sibling_dmas,
            "remote_signals": engines.remote_signals,
            "unanswered_waits": engines.unanswered,
            "peer_surplus": run.surplus,
            "failed_checks": dict(run.halts),
            "assumed": dict(run.memory.assumptions),
            "hottest_loop": self.loop(loops[0]) if loops else None,
            "loops": [self.loop(loop) for loop in loops[:num_loops]],
            "phases": self.phases(),
            "scopes": {
                name: {"calls": int(calls), "us": self.microseconds(cycles)}
                for name, (calls, cycles) in sorted(scopes.items(), key=lambda item: -item[1][1])
            },
        }
