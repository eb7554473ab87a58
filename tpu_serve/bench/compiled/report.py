"""What a program would do on a TPU, from its compiled schedule: the entry of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_serve.bench.compiled.machine import CORES
from tpu_serve.bench.compiled.topology import ENVIRONMENT, topology
from tpu_serve.config import ConfigError


class CompileWorkerFailed(Exception):
    """The process that compiles ended without an answer; the message has its last words."""


def bound(analytic: Mapping[str, Any], chip: str, num_devices: int) -> tuple[float, str] | None:
    """The least time a call can take by the peak rates of the chip, in microseconds, and which of "mxu", "hbm" and "ici" sets it.

    Args:
      analytic: see `Program`; "bound_us" is taken as it is, and then set by "given".

    Returns:
      None if nothing is known.

    Raises:
      ConfigError: "peak" is a type that the chip has no arithmetic in.
    """
    if "bound_us" in analytic:
        return float(analytic["bound_us"]), "given"
    core = CORES[chip]
    times: dict[str, float] = {}
    if "flops" in analytic:
        kind = analytic.get("peak", "bfloat16")
        if kind not in core.chip.peak_ops:
            raise ConfigError(
                f"{chip} has no arithmetic of its own in {kind!r}; it has it in {', '.join(core.chip.peak_ops)}."
            )
        times["mxu"] = analytic["flops"] / core.chip.peak_ops[kind]
    if "hbm_bytes" in analytic:
        times["hbm"] = analytic["hbm_bytes"] / core.chip.hbm_bytes_per_second
    if "ici_bytes" in analytic:
        rate = core.link_bytes_per_cycle(topology(chip, num_devices).grid) * core.clock_hz
        times["ici"] = analytic["ici_bytes"] / rate
    if not times:
        return None
    limit = max(times, key=times.__getitem__)
    return times[limit] * 1e6, limit


def words_of(process: subprocess.Popen[str], timeout_s: float, stop: threading.Event | None) -> str | None:
    """What a process says until it ends; None when it was killed, after `timeout_s` seconds or because of `stop`."""
    end = time.monotonic() + timeout_s
    try:
        while True:
            left = end - time.monotonic()
            try:
                output, errors = process.communicate(timeout=max(0.0, left if stop is None else min(left, 0.2)))
                return errors or output
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end or (stop is not None and stop.is_set()):
                    return None
    finally:
        process.kill()  # harmless when it has ended


_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
# Copies beside the kernels are left out of the time without a word while they would add less than this share.
_SMALL_SHARE = 0.01


def untimed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Why `modelled_us` of a report is not the time of the whole program, by kind; empty if it is.

    Returns:
      "unread": names of kernels that could not be read, of which nothing is known;
      "unknown": names of kernels whose way depends on operands that were not given, so that theirs are those of some other call,
        collectives left out;
      "loops": number of loops and branches of XLA's, the kernels in which are counted once each;
      "copies": microseconds that copies beside the kernels take at least, where that is 1 % of the time or more;
      "collectives", "sparse core": number of operations of that kind, of which at most a part is timed.
    """
    kernels, outside = found.get("kernels", {}), found.get("outside", {})
    rate = CORES[found["chip"]].chip.hbm_bytes_per_second
    copies = round(found.get("copied_bytes", 0) / rate * 1e6, 3)
    reasons = {
        "unread": [name for name, facts in kernels.items() if "error" in facts],
        "unknown": [
            name
            for name, facts in kernels.items()
            if facts.get("depends_on_unknown") and facts.get("operation", "").removesuffix("-start") not in _COLLECTIVES
        ],
        "loops": outside.get("while", 0) + outside.get("conditional", 0),
        "copies": copies if copies >= _SMALL_SHARE * (found["modelled_us"] or 0) else 0,
        "collectives": sum(outside.get(name, 0) + outside.get(f"{name}-start", 0) for name in _COLLECTIVES),
        "sparse core": outside.get("call-start", 0) + outside.get("async-start", 0),
    }
    return {kind: reason for kind, reason in reasons.items() if reason}


def report(
    target: str,
    kwargs: Mapping[str, Any],
    chip: str,
    num_devices: int,
    timeout_s: float = 600.0,
    *,
    stop: threading.Event | None = None,
    scopes: bool = False,
    dump_folder: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Compiles a target in a fresh process, runs its schedules and reports them.

    Args:
      target: "module:function"; the function gets the devices and `kwargs` and returns a `Program`. It is imported in the new
        process, which searches the modules where this one does.
      kwargs: what JSON can carry.
      chip, num_devices: the slice, see `topology`.
      timeout_s: after which the process is killed and the report holds only an error.
      stop: when it is set, the process is killed at once and the report holds only an error.
      scopes: trace `jax.named_scope`s inside kernels. Adds barriers, so its times are for attribution and not for the headline.
      dump_folder: an existing empty folder in which to keep the compiler's dump.

    Returns:
      chip, num_devices, target, kwargs, topology, error (one line if the compiler refused or time ran out, else None),
      compile_seconds, argument_bytes, output_bytes, temporary_bytes, alias_bytes (of a device's HBM), analytic, outside (number of XLA
      operations beside the kernels), copied_bytes (in HBM, see `compiler.copied_bytes`), kernels (by name, see `Findings.summary`, and
      vmem_bytes, operation (in HLO) and depends_on_unknown, see `Execution`; or an error), modelled_us (of all of them, each run once),
      main_kernel (the longest), untimed (what is missing in modelled_us, see `untimed`), bound_us, bound_by, and ratio (modelled_us over
      bound_us). Bytes, bundles and counts are exact, microseconds and stalls modelled: see the package's text.

    Raises:
      ConfigError: no such slice, or see `bound`.
      CompileWorkerFailed: the target could not be imported or called, or the compiler crashed.
    """
    topology(chip, num_devices)
    request = {"target": target, "kwargs": dict(kwargs), "chip": chip, "num_devices": num_devices, "scopes": scopes}
    found: dict[str, Any] = {
        **request,
        "error": None,
        "kernels": {},
        "analytic": {},
        "modelled_us": None,
        "main_kernel": None,
    }
    with tempfile.TemporaryDirectory(prefix="tpu-serve-compiled-") as temporary:
        folder = Path(temporary)
        dump = Path(dump_folder) if dump_folder is not None else folder / "dump"
        dump.mkdir(exist_ok=True)
        request |= {"dump_folder": str(dump.resolve()), "keep_text": dump_folder is not None}
        (folder / "request.json").write_text(json.dumps(request))
        files = [str(folder / "request.json"), str(folder / "answer.json")]
        search = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with subprocess.Popen(
            [sys.executable, "-m", "tpu_serve.bench.compiled.worker", *files],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": search},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process:
            said = words_of(process, timeout_s, stop)
        if said is None:
            return found | {"error": "stopped" if stop and stop.is_set() else f"no answer after {timeout_s:g} s"}
        if not (folder / "answer.json").exists():
            words = "\n".join(said.strip().splitlines()[-8:])
            raise CompileWorkerFailed(
                f"{target} on {chip} with {num_devices} devices, exit {process.returncode}:\n{words}"
            )
        found |= json.loads((folder / "answer.json").read_text())
    times = {name: facts["us"] for name, facts in found["kernels"].items() if "us" in facts}
    if times:
        found |= {"modelled_us": round(sum(times.values()), 3), "main_kernel": max(times, key=times.__getitem__)}
    if found["error"] is None:
        found["untimed"] = untimed(found)
    least = bound(found["analytic"], chip, num_devices)
    if least is not None:
        found["bound_us"], found["bound_by"] = round(least[0], 3), least[1]
        if found["modelled_us"]:
            found["ratio"] = round(found["modelled_us"] / least[0], 3)
    return found
