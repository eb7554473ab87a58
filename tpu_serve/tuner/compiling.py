"""Trying configs with the TPU's compiler alone, on any machine. A score is calculated or modelled, never measured."""

from __future__ import annotations

import math
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_serve.bench.compiled.program import Program
from tpu_serve.bench.compiled.report import CompileWorkerFailed, report
from tpu_serve.bench.compiled.topology import ENVIRONMENT
from tpu_serve.device.chip import MIB
from tpu_serve.kernels.fused_moe_v2.buffers import delivered_rows
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem, item_bytes
from tpu_serve.tuner.estimate import estimate, outside_seconds
from tpu_serve.tuner.process import Worker, WorkerFailed
from tpu_serve.tuner.trial import BYTES, FAILED, REFUSED, SCHEDULE, WORKED, Stopped, Task, Trial

WEIGHTS_SHARE = 0.1
"""Of a device's expert weights, what the program may keep in HBM beside its rows. The smallest of the matrices that XLA could copy is a third."""

SMALL_BYTES = 8 * MIB
"""What metadata and parts of sums may take in any case."""


_SUM = "moe_combine_gather"
"""The final sum. It goes another way for rows that are not finite, and whether there are such is not known; those of a model are finite."""


def weight_bytes(problem: Problem) -> float:
    """A device's expert weights, without scales."""
    p = problem
    return 3 * p.local_experts * p.padded_hidden * p.padded_intermediate * item_bytes(p.weights.weight)


def most_temporary_bytes(problem: Problem, config: Config) -> float:
    """HBM that the program may take beside arguments and result.

    Mode G keeps there the tokens of the group, the rows that come home or are summed on the experts' device, and for sums on the way
    everyone's part; XLA may hold each of them twice, as it changes their layout before or after a kernel.
    """
    p = problem
    row = p.row_lanes * LANES * max(item_bytes(p.dtype), item_bytes(p.combine_type))
    rows = p.group_tokens
    if config.mode == "G":
        rows += delivered_rows(p, config) + (p.group_tokens if config.combine == "rs" else 0)
    return WEIGHTS_SHARE * weight_bytes(p) + SMALL_BYTES + 2 * rows * row


def copied_weights(text: str, problem: Problem) -> list[str]:
    """Instructions of an optimised HLO text that make an array as large as one of the weights, in HBM: copies at every call."""
    p = problem
    experts, hidden, inner = p.local_experts, p.padded_hidden, p.padded_intermediate
    shapes = {(experts, 2, hidden, inner), (experts, inner, hidden)}
    found = []
    for name, result, operation in re.findall(
        r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\(", text, re.MULTILINE
    ):
        if operation in ("parameter", "get-tuple-element", "bitcast", "tuple", "copy-done", "while"):
            continue
        for dims, layout in re.findall(r"\[([\d,]+)\](\{[^}]*\})?", result):
            if tuple(map(int, dims.split(","))) in shapes and "S(" not in layout:
                found.append(f"{operation} {name}")
                break
    return found


def objection(problem: Problem, config: Config, temporary_bytes: float, text: str) -> str | None:
    """Why a program that compiles is not good enough, or None."""
    if copies := copied_weights(text, problem):
        return f"the program copies weights at every call: {', '.join(copies[:3])}"
    most = most_temporary_bytes(problem, config)
    if temporary_bytes > most:
        return f"the program takes {temporary_bytes / MIB:.0f} MiB of HBM beside its arguments, {most / MIB:.0f} MiB are expected"
    return None


def handler() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """In a process of its own: compiles tasks, one after the other."""
    import jax

    from tpu_serve.bench.compiled.compiler import compile_here
    from tpu_serve.bench.compiled.topology import target_devices, topology
    from tpu_serve.bench.fused_moe import layer

    jax.config.update("jax_enable_compilation_cache", False)
    slices: dict[tuple[str, int], list[Any]] = {}

    def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        task = Task.of_json(request)
        assert task.config is not None
        where = task.chip.name, task.problem.num_devices
        if where not in slices:
            slices[where] = target_devices(topology(*where))
        made = compile_here(*layer(task.problem, task.config, task.chip, slices[where]))
        jax.clear_caches()  # programs would be kept for ever
        against = made.error or objection(task.problem, task.config, made.temporary_bytes, made.text)
        found = {"compile_seconds": round(made.seconds, 2), "temporary_bytes": made.temporary_bytes}
        return {"against": against, "found": found}

    return answer


class Compile:
    """An `Executor` that compiles in one process, over and over, and calculates the score.

    Args:
      timeout_s: for one config.
      stop: see `Worker`.
      handler: another one than the compiler's, see `Worker`.
    """

    kind = BYTES
    routing = "uniform"

    def __init__(
        self, timeout_s: float, stop: threading.Event | None = None, handler: str = f"{__name__}:handler"
    ) -> None:
        self._timeout_s = timeout_s
        self._worker = Worker(handler, {}, ENVIRONMENT, stop)

    def run(self, task: Task) -> Trial:
        assert task.config is not None
        try:
            answer = self._worker.ask(task.as_json(), self._timeout_s)
        except WorkerFailed as error:
            return Trial(FAILED, str(error))
        if answer["against"] is not None:
            return Trial(REFUSED, answer["against"], found=answer["found"])
        return calculated(task, answer["found"])

    def close(self) -> None:
        self._worker.close()


def calculated(task: Task, found: Mapping[str, Any], reason: str = "") -> Trial:
    """What worked, with the calculated score."""
    assert task.config is not None
    made = estimate(task.problem, task.config, task.chip)
    parts = {name: round(seconds * 1e6, 2) for name, seconds in made.parts.items()}
    return Trial(WORKED, reason, round(made.us, 3), BYTES, {**found, "calculated_us": parts})


class Schedule:
    """An `Executor` that compiles each config in a fresh process and executes the schedule.

    The score is the modelled time of the kernels, and the calculated time of what XLA's collectives send around them, which no schedule shows:
    otherwise configs that leave their exchange to XLA would have it for nothing. Where a kernel's way cannot be read, the score is of the
    kind "bytes".

    Args:
      timeout_s: for one config.
      stop: when it is set, `run` raises `Stopped`.
    """

    kind = SCHEDULE
    routing = "uniform"

    def __init__(self, timeout_s: float, stop: threading.Event | None = None) -> None:
        self._timeout_s, self._stop = timeout_s, stop or threading.Event()

    def run(self, task: Task) -> Trial:
        assert task.config is not None
        num_devices, target = task.problem.num_devices, "tpu_serve.tuner.compiling:program"
        with tempfile.TemporaryDirectory(prefix="tpu-serve-tune-") as folder:
            try:
                found = report(
                    target, {"task": task.as_json()}, task.chip.name, num_devices, self._timeout_s,
                    stop=self._stop, dump_folder=folder,
                )  # fmt: skip
            except CompileWorkerFailed as error:
                if self._stop.is_set():  # an interrupt from the keyboard ends that process too
                    raise Stopped from None
                return Trial(FAILED, " ".join(str(error).split()))
            if self._stop.is_set():
                raise Stopped
            hlo = Path(folder) / "hlo.txt"
            text = hlo.read_text() if hlo.exists() else ""
        if found["error"] is not None:
            return Trial(FAILED if found["error"].startswith("no answer") else REFUSED, found["error"])
        return scored(task, found, text)

    def close(self) -> None:
        """Nothing runs between two configs."""


def program(devices: Sequence[Any], task: Mapping[str, Any]) -> Program:
    """A target of `bench.compiled.report`: a task as JSON."""
    from tpu_serve.bench.fused_moe import program_of

    read = Task.of_json(task)
    assert read.config is not None
    return program_of(read.problem, read.config, read.chip, devices)


def scored(task: Task, found: Mapping[str, Any], text: str) -> Trial:
    """What a report of the compiled schedule says about a config.

    Args:
      found: see `compiled.report.report`.
      text: the optimised HLO.
    """
    assert task.config is not None
    kept = {
        name: found.get(name) for name in ("compile_seconds", "temporary_bytes", "modelled_us", "bound_us", "untimed")
    }
    if (reason := objection(task.problem, task.config, found["temporary_bytes"], text)) is not None:
        return Trial(REFUSED, reason, found=kept)
    unread = list(_unread(found))
    if unread or found["modelled_us"] is None:
        return calculated(task, kept, f"its schedule cannot be read: {'; '.join(unread) or 'no kernel'}")
    outside = round(outside_seconds(task.problem, task.config, task.chip) * 1e6, 3)
    score = found["modelled_us"] + outside
    assert math.isfinite(score)
    return Trial(WORKED, "", round(score, 3), SCHEDULE, {**kept, "outside_us": outside})


def _unread(found: Mapping[str, Any]) -> Iterator[str]:
    untimed = found.get("untimed", {})
    if untimed.get("unread"):
        yield f"unread {', '.join(untimed['unread'])}"
    if unknown := [name for name in untimed.get("unknown", ()) if not name.startswith(_SUM)]:
        yield f"unknown operands of {', '.join(unknown)}"
