"""The devices of this machine, asked for in a process of its own: a TPU that someone holds can keep who asks waiting for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpu_serve.cli.finding import Finding, size

LIMIT_SECONDS = 90
_PROGRAM = """
import json, jax
devices = jax.local_devices()
memory = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
print(json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices), "bytes": memory[0]}))
"""


def has_tpu_files() -> bool:
    """Whether the system has devices that look like TPUs."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def look_at_devices() -> list[Finding]:
    """What JAX finds, and what is wrong with that."""
    found, error = ask_jax()
    if found is None:
        return [Finding("devices", f"JAX finds none: {error}", "problem", _advice(error))]
    count, kind = found["count"], found["kind"]
    value = f"{count} x {kind}" + (f", {size(found['bytes'])} each" if found["bytes"] else "")
    if found["platform"] == "tpu":
        return [Finding("devices", value)]
    if has_tpu_files():
        if find_spec("libtpu") is None:
            advice = "pip install 'tpu-serve[tpu]'"
        else:
            advice = "look whether JAX_PLATFORMS keeps JAX off them, and whether this user may open /dev/accel* and /dev/vfio/*"
        return [Finding("devices", f"{value}, although this machine has a TPU", "problem", advice)]
    if found["platform"] != "cpu":
        return [
            Finding(
                "devices", value, "problem", "only TPUs and CPUs are supported; JAX_PLATFORMS=cpu serves on the CPU"
            )
        ]
    return [Finding("devices", f"{value}, no TPU", "hint", "a CPU serves small models for development")]


def ask_jax(program: str = _PROGRAM, seconds: float = LIMIT_SECONDS) -> tuple[dict[str, Any] | None, str]:
    """What a fresh process finds, or None and why it found nothing."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {seconds:g} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found, ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return None, said[-1][:300] if said else f"the process ended with code {done.returncode}"


def _advice(error: str) -> str:
    if "already in use" in error or "no answer" in error or "lockfile" in error:
        return "a TPU serves one process at a time: end the one that holds it (`sudo lsof -w /dev/accel* /dev/vfio/*` names it)"
    if "ModuleNotFoundError" in error:
        return "pip install tpu-serve brings what is missing"
    return "JAX_PLATFORMS=cpu serves on the CPU meanwhile"
