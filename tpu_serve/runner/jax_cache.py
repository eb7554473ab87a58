"""The folder in which JAX keeps what a process compiles, and what it leaves undone there: an entry that was cut short, by a full disk or the end of
a process, cannot be read and is never written again, so its program would be compiled at every start for ever."""

from __future__ import annotations

import logging
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from tpu_serve.runner.compile_counter import num_hits_here

logger = logging.getLogger(__name__)

WRITING_SECONDS = 60.0
"""An entry this young may still be on its way from another process."""
_OTHER_FORMAT = b"\x28\xb5\x2f\xfd"
"""Begins what Zstandard has compressed, with which JAX writes where it is installed; nothing here can read it."""


def compile_or_fetch(lowered: jax.stages.Lowered, folder: Path) -> Any:
    """A `jax.stages.Compiled`, from JAX's cache in the folder if it is there. Where it had to be compiled, entries of its name that cannot be read
    are removed, so that the next start keeps it."""
    hits = num_hits_here()
    compiled = lowered.compile()
    if num_hits_here() == hits:
        remove_damaged(lowered, folder)
    return compiled


def entries(lowered: jax.stages.Lowered, folder: Path) -> set[Path]:
    """What JAX keeps under the name of a program, of this one or of others that are called the same."""
    name = lowered.compiler_ir().operation.attributes["sym_name"].value  # type: ignore[union-attr]
    return set(folder.glob(f"{name}-*-cache"))


def remove_damaged(lowered: jax.stages.Lowered, folder: Path) -> None:
    """Removes entries under the name of a program that cannot be read, which the log says."""
    for path in entries(lowered, folder):
        with suppress(OSError):  # gone, or not to be changed
            if time.time() - path.stat().st_mtime > WRITING_SECONDS and not is_whole(path):
                path.unlink()
                logger.warning("%s was damaged and is removed: the next start keeps its program again", path)


def is_whole(path: Path) -> bool:
    """Whether an entry can be read, as far as can be told.

    Raises:
      OSError: it is gone.
    """
    data = path.read_bytes()
    if data.startswith(_OTHER_FORMAT):
        return True
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True
