"""What a program would do on a TPU, from its compiled schedule: the entry of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
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


def report(
    target: str,
    kwargs: Mapping[str, Any],
    chip: str,
    num_devices: int,
    timeout_s: float = 600.0,
    *,
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
      scopes: trace `jax.named_scope`s inside kernels. Adds barriers, so its times are for attribution and not for the headline.
      dump_folder: an existing empty folder in which to keep the compiler's dump.

    Returns:
      chip, num_devices, target, kwargs, topology, error (one line if the compiler refused or time ran out, else None),
      compile_seconds, argument_bytes, output_bytes, temporary_bytes, alias_bytes (of a device's HBM), analytic, outside (number of XLA
      operations beside the kernels), kernels (by name, see `Findings.summary`, and vmem_bytes; or an error), modelled_us (of all of
      them, each run once), main_kernel (the longest), bound_us, bound_by, and ratio (modelled_us over bound_us). Bytes, bundles and
      counts are exact, microseconds and stalls modelled: see the package's text.

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
        try:
            process = subprocess.run(
                [sys.executable, "-m", "tpu_serve.bench.compiled.worker", *files],
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": search},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return found | {"error": f"no answer after {timeout_s:g} s"}
        if not (folder / "answer.json").exists():
            words = "\n".join((process.stderr or process.stdout).strip().splitlines()[-8:])
            raise CompileWorkerFailed(
                f"{target} on {chip} with {num_devices} devices, exit {process.returncode}:\n{words}"
            )
        found |= json.loads((folder / "answer.json").read_text())
    times = {name: facts["us"] for name, facts in found["kernels"].items() if "us" in facts}
    if times:
        found |= {"modelled_us": round(sum(times.values()), 3), "main_kernel": max(times, key=times.__getitem__)}
    least = bound(found["analytic"], chip, num_devices)
    if least is not None:
        found["bound_us"], found["bound_by"] = round(least[0], 3), least[1]
        if found["modelled_us"]:
            found["ratio"] = round(found["modelled_us"] / least[0], 3)
    return found
