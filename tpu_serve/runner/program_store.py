"""Compiled programs in a folder, found by what they were made of: how programs that were made elsewhere, for devices that were not there, get here.

JAX's own cache looks programs up by more than that, by what a running device says of itself among others, which nobody can say without one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from tpu_serve.config import ConfigError
from tpu_serve.runner.compilation import Made, Program
from tpu_serve.runner.compile_counter import count_hit
from tpu_serve.runner.jax_cache import compile_or_fetch

logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER, SUFFIX = "programs", ".program"
_PACKAGES = ("jax", "jaxlib", "libtpu")
_FIGURES = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file says of its program before the program itself.

    Attributes:
      name: of the program.
      seconds: that it took to compile.
      memory: figures of `CompiledMemoryStats` by name, in bytes; empty where the compiler did not tell.
    """

    name: str
    seconds: float
    memory: Mapping[str, int]

    @property
    def figures(self) -> Any:
        """Stands for `CompiledMemoryStats`; None where the compiler did not tell."""
        return SimpleNamespace(**self.memory) if self.memory else None


class ProgramStore:
    """The programs in a folder. Like every cache of compiled programs it is trusted: who can write there can run code here.

    Args:
      folder: of --compile-cache-dir.
      devices: that the programs run on, in the order of the mesh.
      flags: the compiler's, from the environment.
    """

    def __init__(self, folder: Path, devices: Sequence[Any], flags: Sequence[str] = ()):
        self.folder, self._devices, self._flags = folder / FOLDER, list(devices), tuple(flags)
        self._has_any = any(self.folder.glob(f"*{SUFFIX}"))

    def take_or_compile(self, program: Program) -> Made:
        """A program from the folder, or compiled now, where it may come from JAX's own cache."""
        lowered = program.lower()
        if self._has_any and (found := self.load(program.name, lowered)) is not None:
            count_hit()
            return found
        return Made(compile_or_fetch(lowered, self.folder.parent))

    def path(self, name: str, lowered: jax.stages.Lowered) -> Path:
        """Where a program is kept. The same for equal programs of equal versions on equal devices, whatever machine asks."""
        key = hashlib.sha256()
        for part in (FORMAT, *map(_version, _PACKAGES), *self._flags, *self._described(), lowered.as_text()):
            key.update(f"{part}\n".encode())
        return self.folder / f"{name.replace(' ', '-')}-{key.hexdigest()[:40]}{SUFFIX}"

    def load(self, name: str, lowered: jax.stages.Lowered) -> Made | None:
        """A program ready to run, or None, of which the log has the reason."""
        path = self.path(name, lowered)
        try:
            with path.open("rb") as file:
                entry, payload = _entry(file.readline()), file.read()
            compiled = deserialize_and_load(
                zlib.decompress(payload), jax.tree.structure(lowered.args_info), lowered.out_tree,
                backend=self._devices[0].client, execution_devices=self._devices,
            )  # fmt: skip
        except FileNotFoundError:
            logger.info("%s is not among the programs in %s: it is compiled here", name, self.folder)
            return None
        except Exception as error:  # of a pickle, a decompressor, a compiler: anything at all
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            logger.warning("%s cannot be used for the %s, which is compiled here instead: %s", path, name, reason)
            return None
        return Made(compiled, is_kept=True, memory=entry.figures)

    def find(self, name: str, lowered: jax.stages.Lowered) -> Entry | None:
        """What is known of a program that is there already, and whole."""
        try:
            with self.path(name, lowered).open("rb") as file:
                entry = _entry(file.readline())
                zlib.decompress(file.read())
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None
        return entry

    def make(self, name: str, lowered: jax.stages.Lowered) -> Entry:
        """Compiles a program and keeps it; the devices need not be there.

        Raises:
          ConfigError: it cannot be written.
        """
        started = time.perf_counter()
        compiled = lowered.compile()
        told = compiled.memory_analysis()
        figures = {} if told is None else {figure: int(getattr(told, figure)) for figure in _FIGURES}
        entry = Entry(name, round(time.perf_counter() - started, 3), figures)
        payload, _, _ = serialize(compiled)
        path = self.path(name, lowered)
        header = json.dumps({"name": entry.name, "seconds": entry.seconds, "memory": dict(entry.memory)})
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")  # other machines may write here too
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(header.encode() + b"\n" + zlib.compress(payload, 1))
            part.replace(path)  # a reader never sees half of it
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
        return entry

    def _described(self) -> list[str]:
        """The devices and how they lie beside each other; where the whole of them lies does not matter."""
        places = [tuple(getattr(device, "coords", (device.id,))) for device in self._devices]
        origin = [min(values) for values in zip(*places, strict=True)]
        return [
            f"{device.platform} {device.device_kind} {[x - x0 for x, x0 in zip(place, origin, strict=True)]} "
            f"{getattr(device, 'core_on_chip', 0)}"
            for device, place in zip(self._devices, places, strict=True)
        ]


def _entry(line: bytes) -> Entry:
    found = json.loads(line)
    return Entry(str(found["name"]), float(found["seconds"]), dict(found["memory"]))


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
