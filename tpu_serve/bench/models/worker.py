"""One program in a process of its own: `python -m tpu_serve.bench.models.worker REQUEST ANSWER`.

REQUEST and ANSWER are JSON files. The compiler reads LIBTPU_INIT_ARGS once in a process.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_serve.bench.compiled.compiler import one_line
from tpu_serve.bench.compiled.topology import target_devices, topology
from tpu_serve.bench.compiled.worker import main, read_dump
from tpu_serve.bench.models.step import Step
from tpu_serve.config import ConfigError


class _Clock:
    """Seconds between its calls: (by the wall, of this process's processors)."""

    def __init__(self) -> None:
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def __call__(self) -> list[float]:
        before, self._last = self._last, self._now()
        return [round(now - then, 2) for now, then in zip(self._last, before, strict=True)]


def answer(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Compiles what is asked for, with the dump going to `folder`, and reads it.

    Returns:
      error (why there is no program, in one line, or None), refusal (whether it was a ConfigError, before anything was compiled);
      seconds: "trace" (lowering included), "compile" and "read", each by the wall and of processors;
      bytes: of a device's HBM as the compiler says, "arguments", "outputs", "temporaries", "aliases", "code";
      memory: as planned, see `_memory`; moe, see `_moe`; walk, see `_walk`; bound, see `_bound`; most_bytes (of this process).
    """
    from tpu_serve.bench.compiled.collectives import collectives
    from tpu_serve.bench.models.hlo import parse
    from tpu_serve.bench.models.target import make

    wanted = topology(request["chip"], request["num_devices"])
    step = Step.of(request["phase"], request["num_tokens"])
    clock = _Clock()
    try:
        target = make(target_devices(wanted), request["model"], step)
    except ConfigError as error:
        return {"error": str(error), "refusal": True}
    found: dict[str, Any] = {"refusal": False, "memory": _memory(target), "moe": _moe(target)}
    clock()
    try:
        lowered = target.programs.lower(step.num_tokens)
        found["seconds"] = {"trace": clock()}
        program: Any = lowered.compile()
    except Exception as error:
        return found | {"error": one_line(error)}
    found["seconds"]["compile"] = clock()
    memory, text = program.memory_analysis(), program.as_text()
    if request.get("keep_text"):
        (folder / "hlo.txt").write_text(text)
    kernels = read_dump(folder, wanted.chip, wanted.grid, target.scalars)
    found |= {
        "error": None,
        "bytes": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "aliases": memory.alias_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "walk": _walk(target, parse(text), kernels, collectives(text), wanted.grid),
    }
    found["bound"] = _bound(target, found["walk"]["ici_bytes"])
    found["seconds"]["read"] = clock()
    found["most_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def _memory(target: Any) -> dict[str, Any]:
    """Bytes on each device, as planned: weights by kind, caches, sampler; and how many tokens the caches hold."""
    from tpu_serve.engine.report import bytes_by_kind, weight_lines

    placement, plan = target.design.placement, target.plan
    return {
        "weights": bytes_by_kind(weight_lines(placement)),
        "caches": plan.cache_bytes,
        "sampler": plan.sampler_bytes,
        "device": placement.chip.memory_bytes,
        "pages": list(plan.num_pages),
        "cached_tokens": (plan.num_pages[0] - 1) * plan.page_size,
        "copied_axes": [axis for axis in ("heads", "kv_heads") if axis not in placement.rules],
    }


def _moe(target: Any) -> dict[str, Any] | None:
    """How the experts run."""
    plan = target.moe
    if plan is None:
        return None
    return {"way": plan.way, "tiles": plan.tiles, "reason": plan.reason, "format": plan.problem.format}


def _walk(target: Any, module: Any, kernels: Any, collectives: Any, grid: tuple[int, ...]) -> dict[str, Any]:
    """See `timeline.Walk`; collectives by "part operation", and of kernels the longest."""
    from tpu_serve.bench.compiled.machine import CORES
    from tpu_serve.bench.models.timeline import Timeline

    core = CORES[target.chip.name]
    walk = Timeline(module, kernels, collectives, target.step, target.windows, core, grid).run()
    longest = sorted(walk.kernels.items(), key=lambda item: -item[1][2])[:20]
    return {
        "us": walk.us,
        "by_part": dict(walk.by_part),
        "by_origin": dict(walk.by_origin),
        "waiting_us": walk.waiting_us,
        "hbm_bytes": walk.hbm_bytes,
        "ici_bytes": walk.ici_bytes + walk.collective_bytes,
        "collectives": {f"{part}/{operation}": list(counts) for (part, operation), counts in walk.collectives.items()},
        "kernels": {name: list(facts) for name, facts in longest},
        "unread": sorted(walk.unread),
        "unknown": sorted(walk.unknown),
        "loops": sorted(walk.loops),
    }


def _bound(target: Any, ici_bytes: float) -> dict[str, Any]:
    """See `bound.Least`."""
    from tpu_serve.bench.models.bound import least

    moe = target.moe
    expert_type = "bfloat16" if moe is None else moe.problem.weights.activation
    found = least(target.design, target.step, target.plan.page_size, ici_bytes, expert_type)
    return {
        "weight_bytes": found.weight_bytes,
        "cache_bytes": found.cache_bytes,
        "seconds": found.seconds,
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], answer)
