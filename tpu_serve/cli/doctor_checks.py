"""What `tpu-serve doctor` looks at, besides devices."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tpu_serve import __version__
from tpu_serve.cli.doctor_devices import has_tpu_files, look_at_devices
from tpu_serve.cli.finding import GIB, Finding, size
from tpu_serve.config.environment import foreign_variables, relevant_variables

ENOUGH_FILES = 4096
LITTLE_MEMORY_BYTES = 2 * GIB
LITTLE_DISK_BYTES = 2 * GIB
SHOWN_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "numpy",
    "tokenizers",
    "llguidance",
    "fastapi",
    "uvicorn",
    "huggingface-hub",
)


def all_checks(host: str, port: int, cache_folder: Path | None) -> Iterator[Finding]:
    """Everything, in the order in which it is shown.

    Args:
      cache_folder: where compiled programs are kept, None for nowhere.
    """
    yield Finding("tpu-serve", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", f"{platform.platform()}, {_num_cores()} cores")
    yield from look_at_packages()
    yield from look_at_devices()
    yield look_at_memory()
    yield look_at_cache(cache_folder)
    yield look_at_downloads()
    yield look_at_temporary()
    yield look_at_port(host, port)
    yield from look_at_limits(has_tpu_files())
    yield look_at_clock()
    yield from look_at_environment()


def look_at_packages() -> list[Finding]:
    """Versions, and what this package's own requirements say of them."""
    findings = []
    wrong = _unmet_requirements()
    names = {*SHOWN_PACKAGES, *wrong}
    for name in sorted(names, key=lambda name: (name not in SHOWN_PACKAGES, name)):
        version = _version(name)
        if name in wrong:
            findings.append(Finding(name, version or "is missing", "problem", f"pip install '{name}{wrong[name]}'"))
        elif version is not None:
            findings.append(Finding(name, version))
    jax, jaxlib = _version("jax"), _version("jaxlib")
    if jax is not None and jaxlib is not None and jax.split(".")[:2] != jaxlib.split(".")[:2]:
        advice = f"pip install 'jaxlib=={jax}'"
        findings.append(Finding("jax and jaxlib", f"{jax} and {jaxlib} do not belong together", "problem", advice))
    return findings


def _unmet_requirements() -> dict[str, str]:
    """Name and version range of every package that is required and not here in such a version."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("tpu-serve") or []
    except metadata.PackageNotFoundError:  # runs from a checkout
        return {}
    wrong = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong[requirement.name] = str(requirement.specifier)
    return wrong


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def look_at_memory(info: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")) -> Finding:
    """Memory of the host, through which weights pass."""
    try:
        numbers = {name: int(kib) * 2**10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", info.read_text())}
        total, free = numbers["MemTotal"], numbers["MemAvailable"]
    except (OSError, KeyError):
        return Finding("memory", "unknown on this system")
    try:
        bound = int(limit.read_text())
    except (OSError, ValueError):  # there is no limit
        bound = total
    value = f"{size(free)} free of {size(total)}"
    if bound < total:
        value += f", and this container may use {size(bound)}"
    if min(free, bound) < LITTLE_MEMORY_BYTES:
        return Finding("memory", value, "hint", "free some: weights pass through it, one tensor at a time")
    return Finding("memory", value)


def look_at_cache(folder: Path | None) -> Finding:
    """Where compiled programs are kept."""
    name = "compile cache"
    if folder is None:
        return Finding(
            name, "off", "hint", "without it every start compiles everything; leave out --compile-cache-dir off"
        )
    trouble = _write_trouble(folder)
    if trouble:
        advice = f"make {folder} writable, or name another folder with --compile-cache-dir"
        return Finding(name, f"{folder} {trouble}", "problem", advice)
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    used = sum(path.stat().st_size for path in files)
    free = shutil.disk_usage(_existing(folder)).free
    value = f"{folder}: {len(files)} files, {size(used)}; {size(free)} free"
    if free < LITTLE_DISK_BYTES:
        return Finding(name, value, "hint", "the disk is nearly full; old files there may be deleted at any time")
    return Finding(name, value)


def look_at_downloads() -> Finding:
    """Where models from the hub go."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    trouble = _write_trouble(folder)
    if trouble:
        return Finding(
            "hub cache",
            f"{folder} {trouble}",
            "hint",
            "set HF_HUB_CACHE to a folder that is, or name models by their folders",
        )
    return Finding("hub cache", f"{folder}: {size(shutil.disk_usage(_existing(folder)).free)} free")


def look_at_temporary() -> Finding:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
    except OSError as error:
        return Finding(
            "temporary files",
            f"cannot be written: {error.strerror}",
            "problem",
            "set TMPDIR to a folder that can be written",
        )
    return Finding("temporary files", tempfile.gettempdir())


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _write_trouble(folder: Path) -> str:
    """Why nothing can be written in a folder, which is made when it is needed; empty when it can."""
    place = _existing(folder)
    if not place.is_dir():
        return "is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else "cannot be written"


def look_at_port(host: str, port: int) -> Finding:
    """Whether a server could listen now."""
    name = f"port {port}"
    if not 0 <= port <= 65535:
        return Finding(name, "is no port", "problem", "ports are 1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Finding(
                name,
                f"in use on {host}, perhaps by a server that runs",
                "problem",
                "serve with another --port, or end what listens there",
            )
        if error.errno == errno.EACCES:
            return Finding(name, "needs more rights", "problem", "serve with a --port above 1023")
        return Finding(
            name, f"cannot be used on {host}: {error.strerror}", "problem", "serve with another --host or --port"
        )
    return Finding(name, f"free on {host}")


def look_at_limits(has_tpu: bool) -> list[Finding]:
    """Limits of a process that large servers meet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = [Finding("open files", _limit(soft))]
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        more = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        advice = f"each connection needs one; run `ulimit -n {more}` before serving many clients"
        findings = [Finding("open files", f"{soft} at most", "hint", advice)]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if has_tpu and locked != resource.RLIM_INFINITY:
        advice = "libtpu pins memory: run `ulimit -l unlimited`, or give the container that limit"
        findings.append(Finding("locked memory", f"{size(locked)} at most", "hint", advice))
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if has_tpu and pages.is_file() and "[always]" not in pages.read_text():
        advice = f"the TPU starts faster with them: echo always | sudo tee {pages}"
        findings.append(Finding("huge pages", "not always used", "hint", advice))
    return findings


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number} at most"


def look_at_clock(now: float | None = None) -> Finding:
    """A clock that is far off breaks certificates, and logs are misleading."""
    now = time.time() if now is None else now
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    written = Path(__file__).stat().st_mtime
    if now < written - 86400:
        return Finding(
            "clock",
            f"{shown}, which is before this program was installed",
            "hint",
            "set it, or start a time service: certificates and logs need it",
        )
    return Finding("clock", shown)


def look_at_environment() -> list[Finding]:
    """Variables that matter, and those that do not although they look so."""
    findings = [Finding(f"${name}", value) for name, value in relevant_variables().items()]
    if others := foreign_variables():
        advice = "use flags instead (`tpu-serve serve --help`)"
        findings.append(
            Finding("other servers' variables", f"{', '.join(others)}: without effect here", "hint", advice)
        )
    return findings
